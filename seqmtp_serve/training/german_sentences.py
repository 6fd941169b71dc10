"""German sentences put together from a small grammar, for translation prompts."""

from __future__ import annotations

import random

from seqmtp_serve.training.word_lists import word_lists


def german_sentence(rng: random.Random) -> str:
    """One sentence, newspaper or everyday style; its grammar is right, its sense is a matter of luck."""
    words = word_lists("german")
    year, num = rng.randint(1950, 2030), rng.randint(5, 95)
    if rng.random() < 0.3:
        return rng.choice(words["leads"]).format(topic=rng.choice(words["topics"]), num=num)
    subjects = words["subjects"] + words["subjects_plural"]
    index = rng.randrange(len(subjects))
    forms, ending = rng.choice(words["verbs"]).split(";")
    verb = forms.split("/")[index >= len(words["subjects"])]
    subject, time = subjects[index], rng.choice(words["times"]).format(year=year)
    middle = [rng.choice(words["objects"]), ending]
    if rng.random() < 0.5:
        middle.insert(0, rng.choice(words["places"]))
    if rng.random() < 0.4:
        start = [time[0].upper() + time[1:], verb, subject[0].lower() + subject[1:]]
    else:
        start = [subject, verb, time]
    return " ".join(start + middle) + rng.choice(words["tails"]) + "."
