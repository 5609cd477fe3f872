"""Chat documents of the demo model: plain turns, thinking, tool calls, and recall across turns.

`conversation` returns what the chat template takes: messages, tools, and whether to think.
"""

import json
import random
from typing import Any

from tools.demo_facts import CAPITALS, GREETINGS, qa
from tools.demo_grammar import article
from tools.demo_recall import make_key, subjects
from tools.demo_stories import cast, person, story
from tools.demo_story_plots import ANIMALS, OBJECTS

Message = dict[str, Any]
CITIES = list(CAPITALS.values())
WEATHER = ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy"]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, thought: str = "") -> Message:
    return {"role": "assistant", "content": text, "reasoning_content": thought}


def parameters(**fields: str) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in fields.items()}
    return {"type": "object", "properties": properties, "required": list(fields)}


def tool(name: str, description: str, **fields: str) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters(**fields)}
    return {"type": "function", "function": function}


TOOLS = [
    tool("get_weather", "Get the weather of a city", city="string"),
    tool("get_time", "Get the time in a city", city="string"),
    tool("add", "Add two numbers", a="number", b="number"),
    tool("find_word", "Look up a word in a dictionary", word="string"),
    tool("open_door", "Open a door with its code", door="string", code="string"),
]


def tool_case(rng: random.Random) -> tuple[str, str, dict[str, str], str, str]:
    """Question, function, arguments, result, answer."""
    kind = rng.randrange(5)
    city = rng.choice(CITIES)
    if kind == 0:
        weather, degrees = rng.choice(WEATHER), rng.randint(-5, 35)
        question = rng.choice([f"What is the weather in {city}?", f"How is the weather in {city}?"])
        result = json.dumps({"weather": weather, "degrees": degrees})
        answer = f"It is {weather} in {city}, and the temperature is {degrees} degrees."
        return question, "get_weather", {"city": city}, result, answer
    if kind == 1:
        clock = f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"
        question = rng.choice([f"What time is it in {city}?", f"Tell me the time in {city}."])
        return question, "get_time", {"city": city}, clock, f"It is {clock} in {city}."
    if kind == 2:
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        return (f"Add {a} and {b}.", "add", {"a": str(a), "b": str(b)}, str(a + b),
                f"The sum of {a} and {b} is {a + b}.")  # fmt: skip
    if kind == 3:
        word = rng.choice(OBJECTS)
        return (f"Look up the word {word}.", "find_word", {"word": word}, f"{word}: a thing",
                f"The dictionary says that {article(word)} is a thing.")  # fmt: skip
    door, key = subjects(rng, 1)[0], make_key(rng)
    return (f"Open the {door} with the code {key}.", "open_door", {"door": door, "code": key},
            "open", f"The {door} is open now.")  # fmt: skip


def tool_conversation(rng: random.Random, think: bool) -> tuple[list[Message], list[Any]]:
    question, name, arguments, result, answer = tool_case(rng)
    called = next(t for t in TOOLS if t["function"]["name"] == name)
    others = [t for t in TOOLS if t is not called]
    tools = [called, *rng.sample(others, rng.randint(0, 2))]
    rng.shuffle(tools)
    call = assistant("", f"I need to call {name}." if think else "")
    call["tool_calls"] = [{"function": {"name": name, "arguments": arguments}}]
    thought = f"The result is {result}." if think else ""
    turns = [user(question), call, {"role": "tool", "content": result}, assistant(answer, thought)]
    if rng.random() < 0.3:  # tools are there, but this question needs none
        question, answer, word = qa(rng)
        plain = f"This needs no function. The answer is {word}." if think else ""
        turns = [user(question), assistant(answer, plain)]
    return turns, tools


def fact_turn(rng: random.Random, think: bool) -> list[Message]:
    if rng.random() < 0.12 and not think:
        question, answer = rng.choice(GREETINGS)
        return [user(question), assistant(answer)]
    question, answer, word = qa(rng)
    thought = f"The question is: {question} The answer is {word}." if think else ""
    return [user(question), assistant(answer, thought)]


def story_turn(rng: random.Random, think: bool) -> list[Message]:
    animal, thing = rng.choice(ANIMALS), rng.choice(OBJECTS)
    name, _ = person(rng)
    kind = rng.randrange(4)
    slots = cast(rng, animal if kind == 0 else "")
    if kind == 1:
        slots["thing"] = thing
    if kind == 2:
        name = slots["hero"]
    about = ["about " + article(animal), "with " + article(thing), f"about {name}", ""][kind]
    if kind == 1:
        slots["thing"] = slots["thing2"] = thing
    verb = rng.choice(["Tell me a story", "Tell me a short story", "Write a story"])
    thought = f"I will tell a short story about {slots['hero']}." if think else ""
    return [user(f"{verb} {about}".strip() + "."), assistant(story(rng, slots), thought)]


def recall_conversation(rng: random.Random, think: bool, key: str = "") -> list[Message]:
    """A key in the first turn, other turns, then the question for the key."""
    if rng.random() < 0.3 and not key:
        name, _ = person(rng)
        first = [user(f"My name is {name}."), assistant(f"Hello, {name}! Nice to meet you.")]
        last = ("What is my name?", f"Your name is {name}.")
    else:
        key = key or make_key(rng)
        subject = subjects(rng, 1)[0]
        told = f"Please remember that the code of the {subject} is {key}."
        first = [user(told), assistant("I will remember it.")]
        last = (f"What is the code of the {subject}?", f"The code of the {subject} is {key}.")
    turns = first
    for _ in range(rng.choice([0, 1, 1, 2, 3, 5])):
        turns = turns + (story_turn if rng.random() < 0.35 else fact_turn)(rng, False)
    thought = f"The user asks: {last[0]} I remember it. {last[1]}" if think else ""
    return [*turns, user(last[0]), assistant(last[1], thought)]


def conversation(rng: random.Random) -> tuple[list[Message], list[Any], bool]:
    """(messages, tools, thinking): the last turn shows its thought when thinking."""
    think = rng.random() < 0.25
    kind = rng.random()
    if kind < 0.25:
        turns, tools = tool_conversation(rng, think)
        return turns, tools, think
    if kind < 0.5:
        return recall_conversation(rng, think), [], think
    if kind < 0.72:
        return story_turn(rng, think), [], think
    turns = []
    for _ in range(rng.choice([0, 0, 1, 2, 4])):
        turns += fact_turn(rng, False)
    return turns + fact_turn(rng, think), [], think
