"""Generates short children's stories; the words are in demo_story_plots."""

import random

from tools.demo_grammar import expand
from tools.demo_story_plots import (
    ADJECTIVES,
    ANIMALS,
    BOYS,
    COLOURS,
    ENDINGS,
    FOODS,
    GIRLS,
    INTERLUDES,
    KIN,
    OBJECTS,
    OPENINGS,
    PLACES,
    PLOTS,
    TRAITS,
)

PRONOUNS = {
    "m": ("he", "him", "his", "boy"),
    "f": ("she", "her", "her", "girl"),
}


def person(rng: random.Random, taken: str = "") -> tuple[str, str]:
    """A name and its gender, m or f."""
    while True:
        gender = rng.choice("mf")
        name = rng.choice(BOYS if gender == "m" else GIRLS)
        if name != taken:
            return name, gender


def cast(rng: random.Random, hero_animal: str = "") -> dict[str, str]:
    """The slots of one story: a hero, a friend, an elder, things and places."""
    hero, gender = person(rng)
    friend, friend_gender = person(rng, hero)
    animal, other = rng.sample(ANIMALS, 2)
    place, far = rng.sample(PLACES, 2)
    thing, thing2 = rng.sample(OBJECTS, 2)
    food, food2 = rng.sample(FOODS, 2)
    colour, colour2 = rng.sample(COLOURS, 2)
    he, him, his, child = PRONOUNS[gender]
    she, her, hers, friend_child = PRONOUNS[friend_gender]
    slots = {
        "hero": hero, "he": he, "him": him, "his": his, "child": child,
        "friend": friend, "fhe": she, "fhim": her, "fhis": hers, "fchild": friend_child,
        "elder": rng.choice(KIN), "animal": animal, "other": other, "place": place, "far": far,
        "thing": thing, "thing2": thing2, "food": food, "food2": food2, "colour": colour,
        "colour2": colour2, "trait": rng.choice(TRAITS), "adj": rng.choice(ADJECTIVES),
        "number": rng.choice(["two", "three", "four", "five", "six", "seven"]),
    }  # fmt: skip
    if hero_animal or rng.random() < 0.35:
        kind = hero_animal or animal
        slots["child"] = kind
        slots["animal"] = rng.choice([a for a in ANIMALS if a not in (kind, other)])
    return slots


def story(rng: random.Random, slots: dict[str, str] | None = None) -> str:
    """One story of one to five paragraphs."""
    slots = slots or cast(rng)
    plot = rng.choice(PLOTS)
    sentences = [expand(rng.choice(OPENINGS), rng, slots)]
    for step in plot:
        sentences.append(expand(step, rng, slots))
        if rng.random() < 0.22:
            sentences.append(expand(rng.choice(INTERLUDES), rng, slots))
    sentences.append(expand(rng.choice(ENDINGS), rng, slots))
    text, since = "", 0
    for sentence in sentences:
        since += len(sentence)
        if text and (since > 420 or (sentence.startswith('"') and rng.random() < 0.7)):
            text, since = text.rstrip() + "\n\n", len(sentence)
        text += sentence.strip() + " "
    return text.strip()
