"""Word lists of the prompt grid; ``SENTENCES`` are templates for small passages."""

from __future__ import annotations

import re

_TEXT = {
    "adj": "funny, sad, mysterious, cheerful, dark, romantic, inspiring, scary, strange, peaceful, dramatic, short, gothic",
    "tone": "formal, friendly, casual, polite, enthusiastic, professional, sarcastic, serious, humorous, concise, persuasive",
    "person": "a pirate captain, a retired teacher, a detective, a robot, a young doctor, an astronaut, a medieval knight, my boss, "
    "a famous chef, a shy student, the mayor, a wizard, a tour guide, a stand-up comedian, a poet, a football coach, my landlord, "
    "a new colleague, a grandmother, a scientist, a time traveler, an alien, a queen, a farmer, a taxi driver, a ghost, a spy, "
    "a motivational speaker, Sherlock Holmes, Albert Einstein, Cleopatra, William Shakespeare, Leonardo da Vinci, Marie Curie, "
    "Napoleon, Isaac Newton, Socrates, Mozart, a customer, a lawyer, a nurse, a software engineer, a museum guard, a dragon",
    "topic": "climate change, friendship, artificial intelligence, remote work, space travel, healthy eating, social media, music, "
    "public transport, education, online privacy, love, the ocean, chess, meditation, volunteering, renewable energy, sleep, "
    "video games, travel, family traditions, money, democracy, freedom, sports, gardening, photography, dreams, aging, fashion, "
    "vaccines, electric cars, urban planning, immigration, free speech, taxes, technology in schools, veganism, minimalism, art, "
    "stress, leadership, teamwork, language learning, history, death, happiness, winter, the moon, robots, honesty, coffee, war",
    "thing": "an old map, a broken watch, a smartphone, a red bicycle, a wooden box, a laptop, a magic mirror, a coffee machine, "
    "a lost letter, a pair of running shoes, a telescope, a tiny cactus, a hotel room, a vacuum cleaner, a parking garage, a guitar, "
    "a library, an umbrella, a diamond ring, a washing machine, a pizza restaurant, a bank account, a tree, a river, a lighthouse, "
    "a shopping cart, a movie theater, a backpack, a fitness app, a mountain bike, an elevator, a kitchen knife, a painting, a cat",
    "event": "a wedding, a job interview, a birthday party, a product launch, a school trip, a storm, a football final, a power cut, "
    "a graduation, a charity run, a quarterly report, a delayed flight, an election, a fire, a concert, a conference, a bank robbery, "
    "a flood, a housewarming, a strike, a book club meeting, a train accident, a new law, a science fair, a rescue, a trial",
    "place": "Paris, Tokyo, a small village, the desert, New York, Rome, the Amazon rainforest, Iceland, a busy market, Cairo, Sydney, "
    "the Grand Canyon, London, a space station, an abandoned castle, the Alps, Rio de Janeiro, Istanbul, a haunted house, Berlin, "
    "Mount Everest, the Great Wall of China, Venice, Cape Town, the North Pole, a coral reef, Kyoto, Chicago, Lake Victoria, Texas, "
    "Niagara Falls, Hollywood, the Sahara, Stonehenge, Vancouver, Bangkok, Moscow, the White House, Yellowstone, Machu Picchu",
    "bad": "he go to school yesterday and forget his book., they was happy because there team win., me and him likes pizza., "
    "She dont know where is her keys., The informations are very useful for peoples., I has been working here since five years.",
    "plain": "We cannot deliver your order before Friday., The meeting was moved to the afternoon., I like this song a lot., "
    "The old house near the river was sold to a young family., Our sales went down and we need new ideas., It rained all day., "
    "The teacher asked the students to bring a pencil and a notebook., My phone does not work since the last update.",
    "group": "roses, cats, teachers, engineers, birds, poets, swimmers, trees, farmers, robots",
    "day": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
    "t": "apple, carrot, hammer, violin, tiger, car, doctor, river, chair, rose, mercury, football, lamp, shark, castle, bread, iron",
    "lang": "Python, Python, Python, JavaScript, Java, C++, C, Go, Rust, TypeScript, Ruby, Bash",
    "task": "reverses a string, checks whether a number is prime, finds the two largest numbers in a list, counts words in a file, "
    "merges two sorted lists, removes duplicates from a list, computes the factorial of n, checks if a string is a palindrome, "
    "reads a CSV file and prints the average of a column, finds all anagrams of a word, converts Celsius to Fahrenheit, "
    "downloads a web page, validates an email address, sorts dictionaries by a key, finds the longest common prefix, "
    "generates a random password, computes the greatest common divisor, flattens a nested list, rotates a matrix, "
    "finds the missing number in an array, implements a stack with two queues, prints the first n primes, parses a date, "
    "finds the median of two arrays, solves the n queens problem, simulates a bank account, plays tic-tac-toe",
    "verb": "read a file line by line, sort a list, handle errors, make an HTTP request, parse JSON, create a thread, write a loop, "
    "connect to a database, format a date, define a class, test my code, use a hash map, split a string, copy an array",
    "cs": "recursion, a linked list, a hash table, a binary search tree, object-oriented programming, a REST API, TCP, UDP, HTTP, a mutex, "
    "a compiler, an interpreter, garbage collection, a deadlock, dynamic programming, big O notation, a closure, a pointer, SQL, "
    "a relational database, version control, a neural network, encryption, a virtual machine, a container, DNS, a CPU cache",
    "algo": "binary search, quicksort, merge sort, breadth-first search, Dijkstra's algorithm, bubble sort, depth-first search, "
    "the sieve of Eratosthenes, a queue, a binary tree, a linked list, the Fibonacci sequence, a trie, k-means, linear regression",
    "sql": "the five most expensive products, all customers without orders, the average salary per department, duplicate emails, "
    "the second highest salary, the number of orders per month, employees older than their manager",
    "regex": "a phone number, an email address, a date like 2021-05-30, a hexadecimal color, an IP address, a word in capital letters",
    "html": "a contact form, a list of my favorite movies, a button that changes its color, a table of prices, a navigation bar",
    "sci": "photosynthesis, gravity, a black hole, DNA replication, evolution, plate tectonics, the water cycle, quantum entanglement, "
    "a chemical bond, natural selection, entropy, electromagnetism, the immune system, mitosis, an exothermic reaction, superconductivity, "
    "the greenhouse effect, nuclear fusion, a catalyst, the Doppler effect, osmosis, a semiconductor, radioactive decay, relativity, "
    "the Big Bang, a vaccine, an enzyme, a derivative, an integral, a prime number, standard deviation, Bayes' theorem, a vector, "
    "the Pythagorean theorem, a solar panel, a rocket engine, acid rain, the nitrogen cycle, a neuron, insulin, friction, "
    "buoyancy, the periodic table, a transistor, CRISPR, ocean acidification, a fractal, a tsunami, oxidation, genetic drift",
    "hist": "the French Revolution, World War I, World War II, the Roman Empire, the Cold War, the Industrial Revolution, the Renaissance, "
    "the American Civil War, the fall of the Berlin Wall, the Black Death, the Great Depression, the Russian Revolution, the Crusades, "
    "the Silk Road, the moon landing, the abolition of slavery, the Vietnam War, the invention of printing, the Ottoman Empire, "
    "the civil rights movement, the Ming dynasty, the Boston Tea Party, the Enlightenment, the Aztec Empire, the Protestant Reformation",
    "phil": "stoicism, utilitarianism, existentialism, free will, the social contract, Buddhism, capitalism, socialism, supply and demand, "
    "inflation, monetary policy, human rights, justice, nihilism, the golden rule, cultural relativism, feminism, romanticism, irony, "
    "classical conditioning, cognitive dissonance, the placebo effect, federalism, the separation of powers, opportunity cost",
    "country": "France, Japan, Brazil, Kenya, India, Canada, Mexico, Germany, Egypt, Norway, Argentina, Vietnam, Turkey, South Africa, Italy, "
    "Australia, China, Spain, Nigeria, Peru, Poland, Greece, Sweden, Thailand, Indonesia, the United States, the United Kingdom, Cuba, Iran",
    "did": "invented the telephone, wrote Romeo and Juliet, painted the Mona Lisa, discovered penicillin, built the pyramids, was the first "
    "president of the United States, walked on the moon first, composed the Ninth Symphony, founded Microsoft, discovered America, "
    "wrote the Declaration of Independence, invented the light bulb, won the last election in France, plays the lead role in {title}, "
    "sang the theme song of {title}, directed {title}, was the king of England in {year}, won the {sport} championship in {year}, "
    "is the god of war in Greek mythology, ran for president in {year}, owns the most land in {country}, holds the record in {sport}",
    "title": "The Lion King, Titanic, Star Wars, The Godfather, Friends, Breaking Bad, Harry Potter, The Matrix, Frozen, Game of Thrones, "
    "The Simpsons, Jurassic Park, Forrest Gump, The Office, Toy Story, The Great Gatsby, Moby Dick, Pride and Prejudice, Hamlet, "
    "The Lord of the Rings, Stranger Things, Grey's Anatomy, The Walking Dead, Beauty and the Beast, Jaws, Rocky, Top Gun, Dracula",
    "sport": "football, basketball, tennis, cricket, rugby, baseball, volleyball, hockey, golf, chess, swimming, badminton",
    "kind": "animal, plant, country, state, planet, metal, instrument, company, city, material, food, river",
    "invention": "the telephone, the steam engine, the airplane, the internet, the printing press, the light bulb, paper, the compass, "
    "the computer, the refrigerator, television, the bicycle, dynamite, the microscope, the radio, plastic, the zipper, the car",
    "body": "the liver, the heart, the pituitary gland, the kidney, red blood cells, the spleen, the retina, the cerebellum, the pancreas, "
    "the femur, the lungs, a ribosome, the mitochondria, the small intestine, the vena cava, the cell membrane",
    "rev": "The food was cold and the waiter was rude., I loved every minute of this film!, It works, but the battery is weak., "
    "Average product, nothing special., Best purchase I have made this year., The plot made no sense and I left early., "
    "Great service and a fair price., The room smelled bad but the view was amazing., I would not buy it again., It was okay.",
    "hobby": "running, cooking, learning the piano, saving money, public speaking, yoga, chess, writing, losing weight, studying, drawing, "
    "growing tomatoes, learning Spanish, sleeping better, cycling, job interviews, reading more, time management, hiking, knitting",
    "food": "chicken, rice, spinach, eggs, pasta, lentils, salmon, potatoes, mushrooms, apples, chocolate cake, bread, tofu, soup, salad",
}
_WHOLE = ("bad", "plain", "rev")  # whole sentences, with commas of their own
FIELDS: dict[str, tuple[str, ...]] = {key: tuple(re.split(r"(?<=[.!]), " if key in _WHOLE else ", ", text)) for key, text in _TEXT.items()}

SENTENCES = (
    "{n} moved to {place} in {year} and opened a small shop there.|The company of {n} reported {a} new customers in {year}.|"
    "On {day}, {n} and {m} met {person} at {event}.|Scientists from {country} published a study about {sci} in {year}.|"
    "{n}, who was born in {country}, won the {sport} prize {a} times.|A new exhibition about {hist} opened in {place} on {day}.|"
    "The price of {food} rose by {b} percent in {country}.|{m} said that {topic} would change the way people live.|"
    "After {event}, the police in {place} asked witnesses to call before {day}.|The book by {n} tells the story of {person}.|"
    "Visitors of {place} can see {thing} and {thing2} every {day}.|{plain}|"
    "The government of {country} wants to spend {a} million dollars on {topic}."
).split("|")
