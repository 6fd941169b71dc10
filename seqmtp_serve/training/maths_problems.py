"""Word problems with names, things and numbers drawn at random, for the prompt grid."""

from __future__ import annotations

import random

NAMES = (
    "Aisha Ben Carla Dmitri Elena Farid Grace Hiro Ines Jamal Kofi Lena Mateo Nadia Omar Priya Quentin Rosa Samir Tara "
    "Ulrich Vera Wanda Xavier Yuki Zoe Oliver Amelia Lucas Sofia Ethan Maya Noah Chloe Victor Hannah Peter Martha Leo "
    "Beth Frank Julia Kevin Laura Marcus Nina Oscar Paula Ravi Stella Tom Ursula Walter Yara"
).split()
_THINGS = (
    "apples oranges books pencils marbles stickers cookies cupcakes stamps coins candles flowers shirts bottles eggs "
    "tickets toys bracelets cards magazines muffins notebooks oranges peaches photos plants plates puzzles ribbons "
    "sandwiches seashells tomatoes balloons bricks chairs"
).split()
_PLACES = "market farm school bakery library zoo museum park store office garden factory camp stadium beach".split()
_JOBS = "babysitting, gardening, painting, tutoring, walking dogs, washing cars, delivering newspapers".split(", ")
_ANIMALS = "cows sheep goats chickens ducks horses pigs rabbits dogs cats".split()

_PROBLEMS = (
    "{n} has {a} {t} and buys {b} more. Then {n} gives {c} of them to {m}. How many {t} does {n} have now?",
    "{n} earns ${b} an hour {job}. Last week {n} worked {c} hours and this week {d} hours. How much money did {n} "
    "earn in total?",
    "A box holds {b} {t}. There are {a} boxes on each shelf and {c} shelves. How many {t} are there altogether?",
    "{n} reads {a} pages on Monday, twice as many on Tuesday, and {b} fewer on Wednesday than on Tuesday. How many "
    "pages did {n} read in the three days?",
    "The {p} sold {A} tickets on Saturday and {B} tickets on Sunday. Each ticket costs ${b}. How much more money was "
    "made on one day than on the other?",
    "{n} is {a} years old. {m} is {b} years older than {n}, and {o} is half as old as {m}. What is the sum of their ages?",
    "A train travels at {A} miles per hour for {b} hours and then at {B} miles per hour for {c} hours. How far does it "
    "travel?",
    "There are {A} students going to the {p}. Each bus carries {B} students. How many buses are needed, and how many "
    "seats stay empty on the last bus?",
    "{n} buys {a} {t} for ${b} each and {c} {u} for ${d} each. {n} pays with a ${H} bill. How much change does {n} get?",
    "A farmer has {A} {an}. {pc}% of them are sold at the market and {b} more are given to a neighbor. How many {an} "
    "are left?",
    "{n} wants to save ${H}. {n} saves ${b} every week and has already saved ${A}. How many more weeks will it take?",
    "{n} bakes {A} {t}. {n} eats {b}, gives a quarter of the rest to {m}, and packs the remaining ones in bags of {c}. "
    "How many full bags does {n} make?",
    "The price of a jacket is ${H}. It is discounted by {pc}%, and {n} has a coupon for ${b} off the discounted price. "
    "How much does {n} pay?",
    "{n} runs {a} miles every weekday and {b} miles on each weekend day. How many miles does {n} run in {c} weeks?",
    "{n}, {m} and {o} share {A} {t}. {n} gets twice as many as {m}, and {m} gets {b} more than {o}. How many does each "
    "of them get?",
    "A recipe needs {a} cups of flour for {b} servings. How many cups are needed for {A} servings?",
    "A tank holds {H} liters. Water flows in at {b} liters a minute and leaks out at {c} liters a minute. How long does "
    "it take to fill the tank?",
    "{n} has three times as many {t} as {m}. Together they have {A}. How many does {m} have?",
    "It takes {n} {a} minutes to walk to the {p} and {b} minutes to cycle there. {n} walks there and cycles back for "
    "{c} days. How many minutes is that in total?",
    "A shop sells {t} in packs of {a} for ${b}. {m} needs {A} {t}. How much will {m} spend?",
    "If {n} can paint a wall in {a} hours and {m} can paint it in {b} hours, how long do they need together?",
    "What is {pc}% of {H}? Show your steps.",
    "Solve for x: {a}x + {b} = {A}.",
    "Find the area and the perimeter of a rectangle with sides {a} and {b}.",
    "The sum of two numbers is {A} and their difference is {b}. What are the numbers?",
    "What is the average of {a}, {b}, {c}, {d} and {A}?",
    "A bag contains {a} red, {b} blue and {c} green balls. What is the probability of drawing a blue ball?",
    "Compute f({a}) if f(x) = {b}x^2 - {c}x + {d}.",
    "A triangle has corners at (0, 0), ({a}, 0) and ({b}, {c}). What is its area?",
    "What is the remainder when {H} is divided by {b}?",
    "{n}'s {p} class has {A} students. {pc}% of them play soccer, and {b} of those also play tennis. How many play only "
    "soccer?",
    "{n} drives {A} miles a day, {b} days a week. The car uses one gallon for every {d} miles and gas costs ${c} a "
    "gallon. What does {n} spend on gas in a week?",
)


def maths_problem(rng: random.Random) -> str:
    """One problem; the numbers are not checked to make sense, the target answers what it answers."""
    n, m, o = rng.sample(NAMES, 3)
    t, u = rng.sample(_THINGS, 2)
    small = {key: rng.randint(2, 20) for key in "abcd"}
    return rng.choice(_PROBLEMS).format(
        n=n,
        m=m,
        o=o,
        t=t,
        u=u,
        p=rng.choice(_PLACES),
        job=rng.choice(_JOBS),
        an=rng.choice(_ANIMALS),
        pc=rng.choice((5, 10, 15, 20, 25, 30, 40, 50, 60, 75)),
        A=rng.randint(20, 120),
        B=rng.randint(20, 80),
        H=rng.choice((100, 150, 200, 250, 300, 360, 480, 500, 750, 1000, 1200)),
        **small,
    )
