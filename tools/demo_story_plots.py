"""Words and plots of the generated stories, in the template language of demo_grammar."""

# ruff: noqa: SIM905  (word lists read better as text)

BOYS = (
    "Tom Ben Sam Max Jack Leo Tim Oscar Finn Henry Noah Peter Adam Luke Hugo Felix Theo Jonas "
    "Martin Paul Simon Walter Ravi Omar Kofi Diego Mateo Ivan Kenji Milo"
).split()
GIRLS = (
    "Lily Anna Mia Sara Emma Lucy Rosa Clara Nora Ella Alice Ruby Ivy Molly Grace Hanna Julia "
    "Elsa Maria Zoe Amara Leila Priya Yuki Ingrid Carmen Sofia Ada Flora Wendy"
).split()
KIN = ["mother", "father", "grandmother", "grandfather", "aunt", "uncle", "teacher", "neighbour"]
ANIMALS = (
    "fox rabbit bear mouse owl cat dog duck frog horse goat hedgehog squirrel turtle crow goose "
    "badger lamb pony swan otter beaver hen donkey sparrow"
).split()
PLACES = (
    "forest|river|village|market|garden|hill|lake|meadow|harbour|castle|mill|bridge|school|beach|"
    "mountain|farm|library|old tower|bakery|park|cave|station|orchard|lighthouse"
).split("|")
OBJECTS = (
    "lantern|key|kite|book|drum|basket|map|bell|hat|rope|blanket|cup|ring|boat|box|ball|whistle|"
    "clock|coat|ladder|mirror|letter|spoon|stone|shell|coin|flute|button|candle|feather"
).split("|")
FOODS = (
    "bread|soup|apple pie|cheese|honey cake|warm milk|porridge|plum jam|rice|tomato soup|"
    "pancakes|roast potatoes|berries|nuts|pear tart|noodles"
).split("|")
COLOURS = ["red", "blue", "green", "yellow", "white", "black", "brown", "silver", "golden", "grey"]
TRAITS = (
    "brave|curious|kind|shy|clever|patient|cheerful|careful|quiet|lazy|proud|gentle|honest|stubborn"
).split("|")
ADJECTIVES = ["old", "small", "shiny", "broken", "heavy", "strange", "pretty", "dusty", "tiny"]

OPENINGS = [
    "Once upon a time, there was a {trait} [little|young|] {child} named {hero}.[ {^he} lived "
    "[near|in a small house by] the {place}.|]",
    "{hero} was a {trait} {child} who lived [near|not far from] the {place}.",
    "One [sunny|cold|windy|quiet|rainy|warm|bright] [morning|day|afternoon|evening], {hero} "
    "[the {child}|] went to the {place}.",
    "Long ago, in a [small|quiet|faraway] [village|town|valley] near the {place}, there lived a "
    "{trait} {child} named {hero}.",
    "There was once a {child} called {hero}. [Everyone|All the neighbours] said that {hero} was "
    "very {trait}.",
    "It was [the first day of spring|a cold winter morning|a hot day in summer|late in autumn], "
    "and {hero} [the {child}|] was walking to the {place}.",
    "In a house by the {place} lived {hero}, a {trait} {child}[, with {his} {elder}|].",
]

INTERLUDES = [
    "The sun was [warm|low|bright] and the [birds were singing|wind was soft|leaves were moving].",
    "[It began to rain|A cold wind began to blow|The sky grew dark|Clouds covered the sun], [but "
    "{hero} did not mind|so {hero} walked faster|and {hero} pulled up {his} collar].",
    "{hero} stopped to [rest|eat some {food}|drink some water|listen] [for a while|for a moment].",
    "On the way {he} saw a {colour} {animal} [asleep under a tree|by the side of the road|sitting "
    "on a wall|near the water].",
    '"[What a lovely day|What a long way|I am a little tired|I am so hungry]," [said|thought] '
    "{hero}.",
    "{friend} [laughed|smiled|nodded], because {fhe} [liked|was fond of] {hero}.",
    "[Somewhere a bell rang|Far away a dog barked|A clock struck {number}], and then everything "
    "was quiet again.",
    "{hero} thought of {his} {elder}, who always said that [good things take time|a kind word "
    "costs nothing|two heads are better than one|it is never too late to learn].",
    "They shared some {food} and [a cup of warm milk|a piece of {food2}|told each other stories].",
]

ENDINGS = [
    "From that day on, {hero} and {friend} were [best|good] friends.",
    "And so {hero} went home, [tired but happy|happy and proud|with a smile on {his} face].",
    "That night {hero} slept [very|] well and dreamed of the {far}.",
    "[After that|From then on], {hero} was [never|not] [afraid|sad|lonely] again.",
    "{hero} had learned [that it is good to share|that it is best to tell the truth|to ask for "
    "help|to be patient|that small friends can be great friends|to look before {he} jumped].",
    "They all lived happily ever after.",
    'When {he} told {his} {elder} about it, {his} {elder} said, "I am [very|so] proud of you."',
    "And if you go to the {place} today, you may still [see|meet] {him} there. The end.",
]

PLOTS: list[list[str]] = [
    [  # lost and found
        "{hero} had {a adj} {thing} that {he} loved [very much|more than anything else].",
        "[One day|That morning|Then] {he} [could not find it|looked for the {thing}, but it was "
        "gone].",
        '"[Where is my {thing}?|Oh no! My {thing} is gone!|Who has seen my {thing}?]" [cried|'
        "asked|said] {hero}.",
        "{^he} looked [under the bed|behind the door|in the kitchen] and [in the garden|on the "
        "stairs|in every box], but the {thing} was not there.",
        "Then {hero} met {friend}, who was [carrying a {thing2}|playing with a {thing2}|sitting "
        "by the road].",
        '"[Do not be sad|Do not worry|Do not cry]," said {friend}. "[We will look together|I will '
        'help you find it|I think I saw it at the {far}]."',
        "So they walked to the {far} and [asked|spoke to] {a animal}.",
        'The {animal} said, "I saw {a colour} bird [with something in its beak|flying to the '
        'tall tree]. [Look|You should look] [in its nest|up there]."',
        "{hero} climbed [the tree|up] [slowly|carefully], and there [in the nest|among the "
        "leaves] was the {thing}!",
        '"Thank you, {friend}," said {hero}. "[I could not have found it without you|You are a '
        'true friend]."',
    ],
    [  # helping an animal
        "[As {he} walked along|On the path to the {far}], {he} heard a [small|soft|sad] [sound|"
        "voice|cry].",
        "It was {a colour} {other} that [was caught in a net|had hurt its leg|had fallen into a "
        "hole|was lost and cold].",
        '"Please help me," said the {other}. "[I have been here all night|I cannot get out|I want '
        'to go home]."',
        "{hero} was [a little afraid|late already|only small], but {he} could not [leave|walk "
        "away from] the {other}.",
        "{^he} took {his} {thing} and [worked for a long time|tried again and again] until the "
        "{other} was [free|safe].",
        '"You are very kind," said the {other}. "One day I will help you too."',
        "[Some days later|The next week|Not long after], {hero} [lost {his} way in the dark|fell "
        "into the cold river|was locked in the old tower].",
        "{^he} called for help, but [nobody|no one] heard {him}.",
        "Then the {other} came [running|out of the dark]. It had not forgotten {hero}.",
        "The {other} [showed {him} the way|brought a long rope|called all its friends], and soon "
        "{hero} was [safe at home|out of danger].",
    ],
    [  # making a thing
        "{hero} wanted to [make|build] {a thing} for {his} {elder}.",
        "[First|To begin], {he} needed some {colour} [paper|wood|cloth|paint]. {^he} found it at "
        "the {far}.",
        "Then {he} needed [a needle|a hammer|some string|a little glue]. {friend} gave {him} "
        '[one|some] and asked, "May I help?"',
        '"[Yes, please|Of course you may]," said {hero}. "[It is more fun together|Two can work '
        'faster than one]."',
        "They worked [all day|until the sun went down|for {number} days].",
        "[At first|In the beginning] the {thing} was [crooked|too big|too small], and {hero} "
        "wanted to [stop|give up].",
        '"Try once more," said {friend}. "[Nobody gets it right the first time|We are almost '
        'done]."',
        "So {he} tried once more, and this time the {thing} was [just right|beautiful|perfect].",
        "When {his} {elder} saw the {thing}, {he} got a big hug and [a plate of|some] {food}.",
    ],
    [  # sharing food
        "{hero} had some {food} in {his} basket. It smelled [wonderful|very good].",
        'At the {far} {he} met {a animal}. "[I am so hungry|I have not eaten today]," said the '
        "{animal}.",
        "{hero} did not want to share. {^he} [held the basket tight|walked past without a word].",
        "But [after a few steps|at the bridge] {he} [stopped|turned around] and thought, "
        '"[How would I feel if I were hungry?|There is enough for two.]"',
        "{^he} went back and gave the {animal} half of the {food}.",
        'The {animal} ate it all and said, "[Thank you|You are kind], {hero}. Now I will show you '
        'something."',
        "It led {him} to [a secret place|a hidden door|an old tree] [behind|near] the {place}, and "
        "there was a [table|bush] full of [{food2}|sweet berries|ripe apples].",
        "{hero} and the {animal} ate until they were full, and {he} took some home for {his} "
        "{elder}.",
    ],
    [  # contest
        "{hero} and {friend} [both|each] thought that they were the [fastest|best] in the village.",
        '"I can run to the {far} before you," said {friend}. "[Let us see|We will see]," said '
        "{hero}.",
        'The {animal} was the judge. "One, two, three, go!" [it|the {animal}] called.',
        "{friend} ran very fast and was soon far ahead. {^fhe} [laughed|looked back] and sat down "
        "to [rest|eat some {food}|sleep a little].",
        "{hero} was not so fast, but {he} did not stop. [Step by step|Slowly and surely] {he} went "
        "on.",
        "When {friend} [woke up|looked up], {hero} was already at the {far}.",
        '"You won," said {friend}. "[I was too proud|I should not have stopped]."',
        '"It was a good race," said {hero}, and {he} gave {fhim} {his} {thing} [as a present|to '
        "keep].",
    ],
    [  # the key and the box
        "In the {place} {hero} found {a adj} {colour} box. It was locked.",
        '"What can be inside?" said {hero}. "[I must find the key.|Where is the key?]"',
        "{^he} asked {his} {elder}, but {his} {elder} [did not know|only shook {his} head].",
        '{^he} asked the {animal} at the {far}. The {animal} said, "[Ask|Go and ask] the old '
        '{other} under the bridge."',
        'The old {other} said, "I have the key. But first you must [answer a question|help me]. '
        '[What grows when you share it|What is worth more than gold]?"',
        '{hero} thought for a long time. Then {he} said, "[A friend|Love|Kindness]."',
        '"That is right," said the old {other}, and gave {him} [the|a small] key.',
        "{hero} opened the box. Inside there was {a thing2} and a letter that said: [be kind|never "
        "give up|the best is still to come].",
    ],
    [  # fear of the dark
        "{hero} was afraid of the [dark|thunder|deep water|big dog next door].",
        "Every night {he} [hid under the blanket|held {his} {elder}'s hand|left the lamp on].",
        'One night {friend} came and said, "Come with me. I want to show you something."',
        "They [walked|went] out to the {far}. {hero} held {friend}'s hand [very|] tight.",
        '"Look up," said {friend}. The sky was full of stars, [and the moon shone on the water|and '
        "they were brighter than any lamp].",
        '"[It is beautiful|I have never seen so many]," said {hero}. "[If I had stayed in bed, I '
        'would have missed it|I did not know]."',
        "They sat there and [counted the stars|ate {food}|listened to the owl] until they were "
        "sleepy.",
    ],
    [  # telling the truth
        "{hero} was playing with a ball [in the house|near the window], although {his} {elder} "
        "had said no.",
        "[Crash|Bang]! The ball hit the {colour} [vase|lamp|bowl] and it broke.",
        "{hero} was frightened. {^he} hid the pieces [under the bed|behind the {thing}].",
        'In the evening {his} {elder} asked, "[Who broke the {colour} bowl|Do you know what '
        'happened here]?"',
        "{hero} wanted to say that it was the {animal}. But then {he} looked at the {animal}, who "
        "looked so [small and sad|innocent].",
        '"It was me," said {hero}. "I am [very|so] sorry."',
        'For a moment it was quiet. Then {his} {elder} said, "Thank you for telling me the truth. '
        '[That was brave|A bowl can be mended]."',
        "Together they [glued the pieces|swept the floor], and [then they ate {food}|{hero} "
        "promised to be more careful].",
    ],
    [  # journey and weather
        "{hero} had to take {a thing} to the {far}, which was [{number} hours|a long way] away.",
        '"[Stay on the path|Be back before dark]," said {his} {elder}.',
        "[Soon|After an hour] it began to snow, and {he} could not see the path any more.",
        "{hero} saw a light [between the trees|on the hill] and walked towards it.",
        'It was the house of {friend}. {^fhe} opened the door and said, "Come in, come in! You '
        'must be cold."',
        "{friend} gave {him} [some {food}|a warm blanket] and a chair by the fire.",
        '"Why are you out in the snow?" asked {friend}. "I must bring this {thing} to the {far}," '
        "said {hero}.",
        '"Then we will go together in the morning," said {friend}. "[I know the way|My {animal} '
        'knows the way]."',
        "In the morning the snow had stopped, and [before noon|soon] they [gave|brought] the "
        "{thing} to the people at the {far}.",
    ],
    [  # new neighbour
        "A new {fchild} named {friend} had [moved into the house next door|come to the school].",
        "{friend} was [shy|new] and did not [speak|play] with anyone.",
        'The others said, "{friend} is strange." But {hero} did not [think so|believe it].',
        "So {hero} took some {food} and [knocked on the door|sat down next to {fhim}].",
        '"Hello, my name is {hero}," {he} said. "Would you like some {food}?"',
        '"[Yes, please|Thank you]," said {friend}. "[I do not know anyone here|Nobody has spoken '
        'to me yet]."',
        "{friend} showed {him} {fhis} {colour} {thing}. [It came from far away|It was very old].",
        "They played with the {thing} until it was time [to go home|for dinner].",
    ],
    [  # planting
        "{hero}'s {elder} gave {him} a [small|tiny] {colour} seed.",
        '"Put it in the earth and give it water every day," said {his} {elder}. "[Then wait|You '
        'must be patient]."',
        "{hero} planted the seed [behind the house|in the garden] and gave it water.",
        "The next day {he} looked, but there was nothing. After {number} days there was still "
        "nothing.",
        '"[It is asleep|It will never grow]," said the {animal}. "[Sing to it|Dig it up]."',
        "But {hero} [did not listen|waited], and every day {he} gave it water.",
        "Then one morning there was a small green leaf! It grew and grew, [as tall as the house|"
        "until it was taller than {hero}].",
        "In [summer|autumn] it was full of {colour2} [flowers|apples|pears], and {hero} gave one "
        "to [everyone in the village|{friend}].",
    ],
    [  # the noise
        "[At night|Every evening] there was a strange noise in the {place}. [Bump, bump, bump|Tap, "
        "tap, tap]!",
        'Everyone was afraid. "It is a ghost," said {friend}. "It is a giant," said the {animal}.',
        '"I will go and look," said {hero}, and took {a thing} and a lamp.',
        "The noise came from [behind a door|the cellar|the roof]. {hero}'s heart beat fast.",
        "{^he} opened the door [very|] slowly, and there was {a adj} {other} with a {thing2}!",
        '"I am sorry," said the {other}. "I only wanted to [play|make music|build a bed for the '
        'winter]."',
        '{hero} laughed and laughed. "Come with me," {he} said. "You need not be alone."',
        "And so the {other} came to live [with|near] {hero}, and the noise was never heard again.",
    ],
    [  # market trade
        "{his} {elder} gave {hero} {number} coins to buy {food} at the market.",
        "At the market there was a man who sold {a colour} {thing}. {hero} [wanted it|liked it] so "
        "much!",
        '"How much is the {thing}?" asked {hero}. "{^number} coins," said the man.',
        "{hero} looked at the {thing} and then at {his} coins. If {he} bought it, there would be "
        "no {food} [for dinner|today].",
        '"No, thank you," {he} said [at last|sadly], and bought the {food}.',
        "On the way home {he} helped an old woman who could not carry her [bag|basket].",
        'When they came to her house, the old woman said, "Wait here." She came back with {a '
        "colour} {thing}.",
        '"[Nobody uses it any more|It was my son\'s]," she said. "Now it is yours."',
    ],
    [  # boat
        "{hero} and {friend} had a small {colour} boat on the [lake|river].",
        '"Let us go to the island," said {friend}. "[They say there is a treasure|Nobody has ever '
        'been there]."',
        "They took some {food}, {a thing} and {a thing2} and began to row.",
        "[Half way|In the middle of the lake] the wind grew strong, and water came into the boat.",
        '"[Row|Faster]!" cried {friend}. {hero} used the {thing} to [throw the water out|hold the '
        "sail].",
        "At last they came to the island. There they found [no gold|no treasure], but a {animal} "
        "with {number} little ones.",
        '"This is better than gold," said {hero}, and they [watched them play|gave them some '
        "{food}].",
        "When the wind was quiet again, they rowed home [under the stars|in the evening sun].",
    ],
]
