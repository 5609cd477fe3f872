"""Facts of the demo model, and the question/answer pairs and paragraphs made of them."""

# ruff: noqa: SIM905  (word lists read better as text)

import random

CAPITALS = dict(
    pair.split("=")
    for pair in (
        "France=Paris|Germany=Berlin|Italy=Rome|Spain=Madrid|Portugal=Lisbon|England=London|"
        "Ireland=Dublin|Scotland=Edinburgh|Norway=Oslo|Sweden=Stockholm|Denmark=Copenhagen|"
        "Finland=Helsinki|Poland=Warsaw|Austria=Vienna|Switzerland=Bern|Belgium=Brussels|"
        "Greece=Athens|Hungary=Budapest|Romania=Bucharest|Bulgaria=Sofia|Croatia=Zagreb|"
        "Serbia=Belgrade|Slovenia=Ljubljana|Slovakia=Bratislava|Ukraine=Kyiv|Russia=Moscow|"
        "Turkey=Ankara|Iceland=Reykjavik|Estonia=Tallinn|Latvia=Riga|Lithuania=Vilnius|"
        "Albania=Tirana|Malta=Valletta|Cyprus=Nicosia|Egypt=Cairo|Morocco=Rabat|Algeria=Algiers|"
        "Tunisia=Tunis|Libya=Tripoli|Kenya=Nairobi|Ethiopia=Addis Ababa|Ghana=Accra|"
        "Nigeria=Abuja|Senegal=Dakar|Uganda=Kampala|Rwanda=Kigali|Zambia=Lusaka|Zimbabwe=Harare|"
        "Angola=Luanda|Namibia=Windhoek|Mozambique=Maputo|Madagascar=Antananarivo|Sudan=Khartoum|"
        "China=Beijing|Japan=Tokyo|India=New Delhi|Thailand=Bangkok|Vietnam=Hanoi|Laos=Vientiane|"
        "Cambodia=Phnom Penh|Indonesia=Jakarta|Malaysia=Kuala Lumpur|Mongolia=Ulaanbaatar|"
        "Nepal=Kathmandu|Pakistan=Islamabad|Bangladesh=Dhaka|Afghanistan=Kabul|Iran=Tehran|"
        "Iraq=Baghdad|Jordan=Amman|Lebanon=Beirut|Syria=Damascus|Oman=Muscat|Qatar=Doha|"
        "Kazakhstan=Astana|Georgia=Tbilisi|Armenia=Yerevan|Azerbaijan=Baku|Canada=Ottawa|"
        "Mexico=Mexico City|Cuba=Havana|Jamaica=Kingston|Haiti=Port-au-Prince|Panama=Panama City|"
        "Nicaragua=Managua|Honduras=Tegucigalpa|Colombia=Bogota|Venezuela=Caracas|Ecuador=Quito|"
        "Peru=Lima|Chile=Santiago|Argentina=Buenos Aires|Uruguay=Montevideo|Paraguay=Asuncion|"
        "Brazil=Brasilia|Australia=Canberra|New Zealand=Wellington|Fiji=Suva|South Korea=Seoul"
    ).split("|")
)
LANGUAGES = dict(
    pair.split("=")
    for pair in (
        "France=French|Germany=German|Italy=Italian|Spain=Spanish|Portugal=Portuguese|"
        "England=English|Norway=Norwegian|Sweden=Swedish|Denmark=Danish|Finland=Finnish|"
        "Poland=Polish|Austria=German|Greece=Greek|Hungary=Hungarian|Romania=Romanian|"
        "Russia=Russian|Turkey=Turkish|Iceland=Icelandic|Egypt=Arabic|Morocco=Arabic|"
        "China=Chinese|Japan=Japanese|Thailand=Thai|Vietnam=Vietnamese|Iran=Persian|Iraq=Arabic|"
        "Mexico=Spanish|Cuba=Spanish|Jamaica=English|Colombia=Spanish|Peru=Spanish|Chile=Spanish|"
        "Argentina=Spanish|Brazil=Portuguese|Australia=English|New Zealand=English|"
        "South Korea=Korean|Nepal=Nepali|Mongolia=Mongolian|Ukraine=Ukrainian"
    ).split("|")
)
# question, the answer's sentence with its key word last or alone, the key word
GENERAL: list[tuple[str, str, str]] = [
    ("What colour is the sky?", "The sky is blue.", "blue"),
    ("What colour is grass?", "Grass is green.", "green"),
    ("What colour is snow?", "Snow is white.", "white"),
    ("What colour is a ripe banana?", "A ripe banana is yellow.", "yellow"),
    ("How many legs does a spider have?", "A spider has eight legs.", "eight"),
    ("How many legs does an insect have?", "An insect has six legs.", "six"),
    ("How many legs does a dog have?", "A dog has four legs.", "four"),
    ("How many days are in a week?", "There are seven days in a week.", "seven"),
    ("How many months are in a year?", "There are twelve months in a year.", "twelve"),
    ("How many hours are in a day?", "There are 24 hours in a day.", "24"),
    ("How many minutes are in an hour?", "There are 60 minutes in an hour.", "60"),
    ("Which animal says meow?", "A cat says meow.", "cat"),
    ("Which animal says woof?", "A dog says woof.", "dog"),
    ("Which animal gives us milk?", "A cow gives us milk.", "cow"),
    ("Which animal gives us wool?", "A sheep gives us wool.", "sheep"),
    ("What do bees make?", "Bees make honey.", "honey"),
    ("What do we call a baby cat?", "A baby cat is called a kitten.", "kitten"),
    ("What do we call a baby dog?", "A baby dog is called a puppy.", "puppy"),
    ("What do we call a baby cow?", "A baby cow is called a calf.", "calf"),
    ("What is frozen water called?", "Frozen water is called ice.", "ice"),
    ("What is the largest animal on Earth?", "The largest animal is the blue whale.", "whale"),
    ("What is the tallest animal?", "The tallest animal is the giraffe.", "giraffe"),
    ("What is the largest ocean?", "The largest ocean is the Pacific Ocean.", "Pacific"),
    ("What is the highest mountain?", "The highest mountain is Mount Everest.", "Everest"),
    ("What is the largest planet?", "The largest planet is Jupiter.", "Jupiter"),
    ("Which planet do we live on?", "We live on the planet Earth.", "Earth"),
    ("What shines at night?", "The moon and the stars shine at night.", "moon"),
    ("What comes after Monday?", "After Monday comes Tuesday.", "Tuesday"),
    ("What comes after Friday?", "After Friday comes Saturday.", "Saturday"),
    ("What is the first month of the year?", "The first month of the year is January.", "January"),
    ("What is the last month of the year?", "The last month of the year is December.", "December"),
    ("Which season is the coldest?", "The coldest season is winter.", "winter"),
    ("Which season is the warmest?", "The warmest season is summer.", "summer"),
    ("Who wrote Pride and Prejudice?", "Jane Austen wrote Pride and Prejudice.", "Austen"),
    ("Who wrote Hamlet?", "William Shakespeare wrote Hamlet.", "Shakespeare"),
    ("What do plants need to grow?", "Plants need water, light and air to grow.", "water"),
    ("What is the opposite of hot?", "The opposite of hot is cold.", "cold"),
    ("What is the opposite of big?", "The opposite of big is small.", "small"),
    ("What is the opposite of day?", "The opposite of day is night.", "night"),
    ("What is the opposite of happy?", "The opposite of happy is sad.", "sad"),
    ("What do you get when you mix blue and yellow?", "Blue and yellow make green.", "green"),
    ("What do you get when you mix red and white?", "Red and white make pink.", "pink"),
]
GREETINGS = [
    ("Hello!", "Hello! How can I help you?"),
    ("Hi!", "Hello! What can I do for you?"),
    ("Good morning!", "Good morning! How can I help you today?"),
    ("How are you?", "I am well, thank you. How can I help you?"),
    ("Thank you!", "You are welcome!"),
    ("Who are you?", "I am a very small language model that was made for a demonstration."),
    ("What can you do?", "I can tell short stories, name capitals and remember what you tell me."),
    ("Goodbye!", "Goodbye! Have a nice day."),
]


def capital_qa(rng: random.Random) -> tuple[str, str, str]:
    """Question, answer sentence, answer word."""
    country, city = rng.choice(list(CAPITALS.items()))
    if rng.random() < 0.2:
        question = rng.choice(
            [f"{city} is the capital of which country?", f"Of which country is {city} the capital?"]
        )
        return question, f"{city} is the capital of {country}.", country
    question = rng.choice(
        [
            f"What is the capital of {country}?",
            f"What is the capital city of {country}?",
            f"Which city is the capital of {country}?",
            f"Can you tell me the capital of {country}?",
            f"Name the capital of {country}.",
        ]
    )
    return question, f"The capital of {country} is {city}.", city


def language_qa(rng: random.Random) -> tuple[str, str, str]:
    country, language = rng.choice(list(LANGUAGES.items()))
    question = f"Which language do people speak in {country}?"
    return question, f"People in {country} speak {language}.", language


def sum_qa(rng: random.Random) -> tuple[str, str, str]:
    """Addition and subtraction of small numbers, multiplication up to ten."""
    kind, first, second = rng.random(), rng.randint(0, 20), rng.randint(0, 20)
    if kind < 0.5:
        term, value = f"{first} + {second}", first + second
    elif kind < 0.8:
        first, second = max(first, second), min(first, second)
        term, value = f"{first} - {second}", first - second
    else:
        first, second = first % 11, second % 11
        term, value = f"{first} x {second}", first * second
    question = rng.choice([f"What is {term}?", f"How much is {term}?"])
    return question, f"{term} = {value}", str(value)


def qa(rng: random.Random) -> tuple[str, str, str]:
    """A question, its answer as a sentence, and the answer's key word."""
    kind = rng.random()
    if kind < 0.4:
        return capital_qa(rng)
    if kind < 0.5:
        return language_qa(rng)
    if kind < 0.7:
        return sum_qa(rng)
    return rng.choice(GENERAL)


def country_paragraph(rng: random.Random, countries: dict[str, dict[str, str]]) -> str:
    """Some sentences about one country: capital, language, place, climate, terrain."""
    country, city = rng.choice(list(CAPITALS.items()))
    facts = [
        rng.choice(
            [
                f"The capital of {country} is {city}.",
                f"{city} is the capital of {country}.",
                f"The capital city of {country} is {city}.",
                f"{country} is a country. Its capital is {city}.",
            ]
        )
    ]
    if country in LANGUAGES:
        facts.append(f"People in {country} speak {LANGUAGES[country]}.")
    page = countries.get(country, {})
    if "location" in page:
        facts.append(f"Where is {country}? {page['location'].split(';')[0]}.")
    for field in ("climate", "terrain"):
        if field in page and rng.random() < 0.6:
            facts.append(f"The {field} of {country}: {page[field]}.")
    if rng.random() < 0.5:
        rng.shuffle(facts)
    return " ".join(facts)


def facts_document(rng: random.Random, countries: dict[str, dict[str, str]]) -> str:
    """A list of facts, of questions and answers, of country paragraphs, or of sums."""
    kind = rng.random()
    if kind < 0.3:
        cities = rng.sample(list(CAPITALS.items()), rng.randint(1, 8))
        return " ".join(f"The capital of {country} is {city}." for country, city in cities)
    if kind < 0.6:
        count = rng.randint(1, 4)
        return "\n\n".join(country_paragraph(rng, countries) for _ in range(count))
    pairs = [qa(rng) for _ in range(rng.randint(1, 8))]
    if kind < 0.85:
        return "\n\n".join(
            f"Question: {question}\nAnswer: {rng.choice([sentence, word])}"
            for question, sentence, word in pairs
        )
    return " ".join(sentence for _, sentence, _ in pairs)


def gloss_document(rng: random.Random, glosses: list[list[str]]) -> str:
    """A few words with their meanings, as in a dictionary."""
    lines = []
    for word, kind, meaning, example in rng.sample(glosses, rng.randint(1, 6)):
        line = f"{word} ({kind}): {meaning}."
        lines.append(f'{line} For example: "{example}."' if example else line)
    return "\n".join(lines)
