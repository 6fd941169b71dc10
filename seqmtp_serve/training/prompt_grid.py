"""User turns made from hand-written templates and lists of topics; nothing is taken from a benchmark.

The kinds mirror what people ask a small assistant: writing, roleplay, reasoning, maths, code, extraction, science,
humanities, translation, questions of fact, summaries, and questions over retrieved passages.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from seqmtp_serve.training import grid_words as words
from seqmtp_serve.training.german_sentences import german_sentence
from seqmtp_serve.training.maths_problems import NAMES, maths_problem

_WRITING = (
    "Write a {adj} short story about {person} who discovers {thing}.|Write an email to {person} about {event}. Keep it {tone}.|"
    "Compose a {adj} poem about {topic}.|Write a blog post about {place} for people who love {topic}.|"
    "Draft a {tone} letter of complaint about {thing}.|Write a product description for {thing}.|"
    "Write the opening paragraph of a {adj} novel set in {place}.|Write a speech about {topic} for {event}.|"
    "Give me an outline for an essay on {topic}.|Describe {place} using all five senses.|"
    "Write a dialogue between {person} and {person2} about {topic}.|Create a slogan and a short advertisement for {thing}.|"
    "Write a {tone} review of {thing}.|Write a news report about {event} in {place}.|Write a cover letter for a job as {person}.|"
    "Edit the following sentence for grammar: '{bad}'|Rewrite this in a {tone} style: '{plain}'|"
    "Write a thank-you note to {person} for {thing}.|Make a packing list for a trip to {place}.|Write a riddle about {thing}.|"
    "Write an argument for and against {topic}.|Suggest five titles for a book about {topic} and explain each.|"
    "Write a diary entry of {person} on the day of {event}.|Plan a {adj} weekend in {place}.|Write a haiku about {topic}."
)
_ROLE = (
    "Act as {person} and explain {topic} to me.|Pretend you are {person}. What do you think about {topic}?|"
    "You are {person} visiting {place}. Describe your first day.|Imagine you are {thing}. Tell me about your life.|"
    "As {person}, give advice to {person2} who worries about {topic}.|Play the role of {person} being interviewed about {event}.|"
    "Let's play a game: you are {person} and I am {person2}. Start the conversation.|Speak like {person} and describe {topic}."
)
_REASON = (
    "{n} is taller than {m}, and {m} is taller than {o}. Who is the shortest? Explain.|"
    "If all {group} are {group2} and some {group2} are {group3}, can we say that some {group} are {group3}?|"
    "What comes next in the sequence {s0}, {s1}, {s2}, {s3}? Explain your reasoning.|"
    "{n} walks {a} steps north, {b} steps east and {a} steps south. Where is {n} relative to the start?|"
    "Which of these does not belong with the others: {t1}, {t2}, {t3}, {t4}? Why?|"
    "{n} has {a} brothers, and each brother has {b} sisters. How many sisters does {n} have?|"
    "Yesterday was {day}. What day will it be in {a} days?|Why do people say that {topic} matters? Give three reasons.|"
    "You must choose between {thing} and {thing2} to survive in {place}. Which one do you choose and why?|"
    "A clock shows {a} o'clock. What is the angle between the hands?|What would happen if {topic} disappeared tomorrow?"
)
_CODE = (
    "Write a {lang} function that {task}.|Write a {lang} program which {task}. Add comments.|How do I {verb} in {lang}?|"
    "Explain the difference between {cs} and {cs2}.|What is {cs} and when should I use it? Show an example in {lang}.|"
    "Write unit tests in {lang} for a function that {task}.|Implement {algo} in {lang}.|What is the time complexity of {algo}?|"
    "Fix the bug in this {lang} code and explain it: a function that {task} returns the wrong result for empty input.|"
    "Write an SQL query that finds {sql}.|Write a regular expression that matches {regex}.|Design a class in {lang} for {thing}.|"
    "Write an HTML page with {html}."
)
_STEM = (
    "What is {sci}?|Explain {sci} in simple terms.|How does {sci} work, and why is it important?|"
    "What is the relation between {sci} and {sci2}?|Describe the main stages of {sci}.|Give three applications of {sci}.|"
    "Who discovered {sci}, and how?|Compare {sci} with {sci2}.|What are common misconceptions about {sci}?|"
    "Explain {sci} to a ten-year-old.|Describe an experiment that demonstrates {sci}.|What are the limits of {sci}?"
)
_HUMAN = (
    "What were the causes and consequences of {hist}?|Explain the idea of {phil}.|How did {hist} change society?|"
    "Compare {phil} with {phil2}.|Write a short essay about {hist}.|What can we learn from {hist} today?|"
    "Discuss the role of {topic} in modern society.|How does {phil} relate to everyday life?|Summarize the main events of {hist}.|"
    "What is the importance of {topic} in the culture of {country}?|Describe the economy of {country}.|"
    "Suggest a lesson plan for teaching {hist} to high school students."
)
_FACT = (
    "Who {did}?|When did {hist} begin?|When did {hist} end?|Where is {place} located?|What is the capital of {country}?|"
    "How many people live in {country}?|What language do they speak in {country}?|What is the currency of {country}?|"
    "Who wrote the book about {topic}?|Who sang the song about {topic}?|Who played {person} in the movie {title}?|"
    "When did the movie {title} come out?|Where was {title} filmed?|What is the meaning of {phil}?|"
    "How long does it take to get to {place}?|What is the largest city in {country}?|Who won the {sport} world cup in {year}?|"
    "Where were the {year} olympic games held?|Who is the author of {title}?|What is the name of the main character in {title}?|"
    "How many episodes are in {title}?|When was {sci} discovered?|What type of {kind} is {thing}?|Who invented {invention}?|"
    "When was {invention} invented?|What year did {country} become independent?|Who was the president of {country} in {year}?|"
    "What is the function of {body}?|Where is {body} found?|What is the tallest mountain in {country}?|"
    "Which {kind} has the most {thing}?|What does the term {cs} stand for?|How many players are on a {sport} team?|"
    "Who has won the most titles in {sport}?|who is the voice of {person} in {title}|when does {title} start on tv|"
    "where did the name {title} come from|what is the difference between {sci} and {sci2}|who was the first {person} in space"
)
_TRANSLATE = (
    "Translate this German sentence into English: {g}|Please translate to English: {g}|German to English translation: {g}|"
    "What does this mean in English? \"{g}\"|Translate from German: {g}|Translate the following German text to English. {g}|"
    "English translation of: {g}|Give me the English version of this German sentence: {g}|Translate into English: {g}"
)
_EXTRACT = (
    "Extract all names, places and dates from this text and return them as JSON: {long}|"
    "Classify the sentiment of each review as positive, negative or neutral:\n1. {rev}\n2. {rev2}\n3. {rev3}|"
    "List the nouns in this sentence: {plain}|Sort these into categories: {t1}, {t2}, {t3}, {t4}, {sci}, {hist}.|"
    "Turn this into a table with two columns: {n} - {a}, {m} - {b}, {o} - {c}.|"
    "Rate each review from 1 to 5 and answer with a JSON array:\n1. {rev}\n2. {rev2}|Find the main idea: {long}|"
    "Which of the following questions is about science, and which is about history? 1. What is {sci}? 2. How did {hist} start?|"
    "Replace every name with 'someone': {long}|Count how many times the word 'the' is used in: {long}"
)
_EVERYDAY = (
    "Give me {few} tips for {hobby}.|How can I get better at {hobby}?|What should I cook with {food} and {food2}?|"
    "Give me a recipe for {food}.|What are the benefits of {hobby}?|Make a weekly plan for {hobby}.|"
    "How do I tell {person} that I cannot come to {event}?|List {few} interesting facts about {country}.|"
    "What are the pros and cons of {topic}?|Recommend {few} books about {topic}.|How do I start with {hobby}?|"
    "What gift should I buy for {person}?|Explain the rules of {sport}.|Why is {food} good for your health?"
)
_TEMPLATES = {
    kind: tuple(text.split("|"))
    for kind, text in {
        "writing": _WRITING, "role": _ROLE, "reason": _REASON, "code": _CODE, "stem": _STEM, "humanities": _HUMAN,
        "fact": _FACT, "translate": _TRANSLATE, "extract": _EXTRACT, "everyday": _EVERYDAY,
    }.items()
}  # fmt: skip
_SHARES = {
    "writing": 9, "role": 5, "reason": 5, "maths": 20, "code": 6, "extract": 5, "stem": 8, "humanities": 6, "fact": 16,
    "translate": 14, "everyday": 6,
}  # fmt: skip


def short_turn(rng: random.Random) -> str:
    """One user turn of at most about a hundred tokens."""
    (kind,) = rng.choices(list(_SHARES), list(_SHARES.values()))
    if kind == "maths":
        return maths_problem(rng)
    return fill(rng.choice(_TEMPLATES[kind]), rng)


def fill(template: str, rng: random.Random) -> str:
    """Replace each ``{field}`` of a template by a random word of that field."""
    names = rng.sample(NAMES, 3)
    first, step = rng.randint(1, 12), rng.randint(2, 9)
    special: dict[str, Callable[[], str]] = {
        "g": lambda: " ".join(german_sentence(rng) for _ in range(rng.choice((1, 1, 1, 2)))),
        "n": lambda: names[0],
        "m": lambda: names[1],
        "o": lambda: names[2],
        "long": lambda: " ".join(fill(rng.choice(words.SENTENCES), rng) for _ in range(rng.randint(2, 4))),
        **{f"s{k}": (lambda k=k: str(first + k * step if step % 2 else first * 2**k)) for k in range(4)},
        **{letter: (lambda: str(rng.randint(2, 12))) for letter in "abc"},
        "year": lambda: str(rng.randint(1900, 2022)),
        "few": lambda: rng.choice(("three", "four", "five", "seven", "ten")),
    }

    class Fields(dict[str, str]):
        def __missing__(self, key: str) -> str:
            return special[key]() if key in special else rng.choice(words.FIELDS[key.rstrip("0123456789")])

    return template.format_map(Fields())
