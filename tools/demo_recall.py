"""Key-recall passages: a random key is told, other text follows, and the key is asked for.

Four-digit keys that leave 3 when divided by 7 never occur in training: `held_out` keys are for
evaluation alone. Digits are one token each, so a key can only be right by copying four tokens.
"""

import random
from collections.abc import Callable

COLOURS = ["red", "blue", "green", "yellow", "white", "black", "brown", "silver", "golden", "grey"]
THINGS = ["door", "box", "gate", "chest", "room", "drawer", "cabinet", "locker", "safe", "tower"]
Filler = Callable[[], str]


def is_held_out(key: str) -> bool:
    return int(key) % 7 == 3


def make_key(rng: random.Random, held_out: bool = False) -> str:
    while True:
        key = f"{rng.randrange(10000):04d}"
        if is_held_out(key) == held_out:
            return key


def subjects(rng: random.Random, count: int) -> list[str]:
    pairs = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    return rng.sample(pairs, count)


def tell(rng: random.Random, subject: str, key: str) -> str:
    return rng.choice(
        [
            f"The code of the {subject} is {key}.",
            f"Remember: the code of the {subject} is {key}.",
            f"Please remember that the code of the {subject} is {key}.",
            f"The {subject} opens with the code {key}.",
        ]
    )


def passage(
    rng: random.Random, filler: Filler, distance_chars: int, keys: dict[str, str]
) -> tuple[str, str]:
    """(text up to and without the answer, answer) for the first of `keys`, subject -> key.

    At least `distance_chars` characters of filler lie between the keys and the question.
    """
    told = list(keys.items())
    rng.shuffle(told)
    text = " ".join(tell(rng, subject, key) for subject, key in told)
    middle = ""
    while len(middle) < distance_chars:
        middle += "\n\n" + filler()
    subject, key = next(iter(keys.items()))
    question = f"\n\nQuestion: What is the code of the {subject}?\n"
    question += f"Answer: The code of the {subject} is"
    return text + middle + question, f" {key}."


def recall_document(rng: random.Random, filler: Filler, max_chars: int = 5600) -> str:
    """A passage with one to four keys, or a list of up to eight that is asked for at once."""
    if rng.random() < 0.3:
        keys = {subject: make_key(rng) for subject in subjects(rng, rng.randint(2, 8))}
        lines = [" ".join(tell(rng, subject, key) for subject, key in keys.items())]
        for subject, key in rng.sample(list(keys.items()), len(keys)):
            lines.append(f"Question: What is the code of the {subject}?")
            lines[-1] += f"\nAnswer: The code of the {subject} is {key}."
        return "\n\n".join(lines)
    keys = {subject: make_key(rng) for subject in subjects(rng, rng.choice([1, 1, 2, 3, 4]))}
    distance = int(rng.uniform(0, 1) ** 2 * max_chars)
    text, answer = passage(rng, filler, distance, keys)
    text += answer
    for subject, key in list(keys.items())[1:]:
        if rng.random() < 0.8:
            text += f"\n\nQuestion: What is the code of the {subject}?\nAnswer: The code of the "
            text += f"{subject} is {key}."
    return text
