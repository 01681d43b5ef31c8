#!/usr/bin/env python3
"""Writes the text that the embedded base was pretrained on.

Every document comes from a template in this file and a seeded generator, so the
corpus is ours, needs no download and can be made again byte for byte. Names are
put together from random syllables and are new in each document: nothing about
them can be memorised, only copied from further up in the same document. That is
what the base is for: it knows simple English and how to copy.

    python make_text.py --documents 2000 --seed 1 --output corpus.txt

Documents are separated by a line that holds nothing but <|endoftext|>.
"""

import argparse
import random

END_OF_TEXT = "<|endoftext|>"

ONSETS = (
    "b br c cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sc sh sk sl "
    "sm sn sp st str sw t th tr v w wh y z"
).split()
VOWELS = "a a a e e e i i o o u ai ea ee oa oo ou ie".split()
CODAS = (
    "b ck d ff g l ll m n n n ng nd nt p r r rd rk rn rt s sk ss st t th tt v x zz "
    "lb ld lf lm lt mp nk nch rsh"
).split()
ENDINGS = (
    "ton ford by ham wick ley more dale well field bury stead mouth stow combe "
    "worth gate holm ness beck shaw den er ow en a o is et ick and old us ine"
).split()
FIRST_WORDS = (
    "Copper Silver Golden Iron Amber Ivory Scarlet Crimson Velvet Crooked Merry Quiet "
    "Lucky Sleepy Hungry Wandering Laughing Painted Broken Hidden Humble Noble Gentle "
    "Proud Salty Dusty Rusty Misty Windy Sunny Frosty Northern Southern Eastern Western "
    "Upper Lower Old New Great Little Long Round Twisted Whistling Dancing Singing Blue "
    "Green Red White Black Brown Grey Purple Royal Lonely Brave Clever Bitter Sweet Warm "
    "Cold Bright Dark Early Late Second Third Seven Three Twin Hollow Stony Sandy Marble "
    "Paper Linen Woollen Wooden Glass Granite Honey Pepper Ginger Clover Maple Willow"
).split()
SECOND_WORDS = (
    "Kettle Mill Anchor Bell Lantern Harp Barrel Fox Hare Badger Otter Heron Swan Raven "
    "Sparrow Pheasant Salmon Trout Whale Lion Bear Wolf Stag Horse Lamb Crown Sword Shield "
    "Arrow Plough Wheel Hammer Anvil Needle Thimble Candle Spoon Ladle Basket Bucket Bottle "
    "Goblet Saucer Teapot Oven Hearth Chimney Window Gate Bridge Tower Castle Abbey Chapel "
    "Court Hall House Garden Orchard Meadow Brook River Pond Harbour Quay Pier Island Rock "
    "Hill Valley Wood Oak Elm Ash Birch Rose Lily Thistle Ivy Acorn Apple Pear Plum Cherry "
    "Walnut Feather Button Ribbon Mitten Slipper Boot Compass Map Star Moon Sun Cloud Storm"
).split()
NOUNS = (
    "lamp cup box coat key boat clock bag chair table stone book letter rope basket "
    "bottle hat ring drum bell kite broom ladder mirror pot bowl spade saw hammer net sail "
    "flag horn pipe pen map coin knife fork spoon plate jug barrel candle blanket pillow "
    "shawl glove boot cart wheel saddle bridle cage feather shell jar tin sack crate chest"
).split()
COLOURS = "red blue green white black brown grey yellow purple orange pink silver golden".split()
SIZES = "small large tiny heavy light long short wide narrow round square old new broken".split()
FOODS = (
    "bread soup cheese dumplings noodles pancakes pies stew apples pears plums honey cake "
    "biscuits oysters crab salmon trout eels sausages ham eggs beans rice porridge tarts "
    "mussels waffles mutton onions pickles mushrooms curry dates figs walnuts chestnuts"
).split()
FLAVOURS = (
    "onion mushroom plum apple pear honey ginger pepper bean fish crab smoked roast fried sweet "
    "salt warm cold spiced green lemon cherry potato herb nut egg ham"
).split()
DRINKS = "tea coffee milk cider water ale wine cocoa lemonade broth".split()
KINDS = (
    "teahouse;bakery;inn;tavern;chop house;noodle bar;soup kitchen;wine cellar;fish shop;"
    "coffee room;pie shop;dining hall;library;school;mill;forge;chapel;workshop;theatre"
).split(";")
AREAS = (
    "old harbour;market square;upper town;lower town;river bank;castle yard;north quarter;"
    "garden district;station road;weavers' lane;hill side;east docks;canal street;"
    "cathedral close;fish market;glass works;salt meadows;bell street;city wall"
).split(";")
PRICES = (
    "cheap;costly;moderate;fair;high;low;modest;steep;five pence;ten pence;two shillings;"
    "half a crown;three crowns;one florin"
).split(";")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January March April May June July August September October November December".split()
WEATHER = "rain;fog;snow;a strong wind;bright sun;frost;hail;a warm breeze;thick mist".split(";")
TRADES = (
    "baker;miller;smith;tailor;sailor;clerk;teacher;farmer;carpenter;cook;weaver;potter;"
    "shepherd;fisher;porter;gardener;printer;doctor;mason;cooper"
).split(";")
MOODS = "happy sad tired proud angry calm afraid glad hungry curious lonely pleased".split()
FIELDS = (
    "owner colour weight origin maker guest room dish drink day master captain cargo port "
    "street trade friend song tool horse tree river teacher lesson prize town season pet "
    "game hat number metal cloth seed flower doctor ship star gate code mark"
).split()
ODD_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789'-&+%$@_éèüöäåøñçß"
NUMBER_WORDS = "two three four five six seven eight nine ten eleven twelve twenty thirty".split()


WORD_LISTS = (
    FIRST_WORDS, SECOND_WORDS, NOUNS, COLOURS, SIZES, FOODS, FLAVOURS, DRINKS, KINDS, AREAS, PRICES,
    DAYS, MONTHS, TRADES, MOODS, FIELDS, NUMBER_WORDS,
)


class Writer:
    """Random words, names and values, all drawn from one seeded generator."""

    def __init__(self, rng):
        self.rng = rng
        self.pick = rng.choice

    def chance(self, probability):
        return self.rng.random() < probability

    def syllable(self):
        coda = self.pick(CODAS) if self.chance(0.6) else ""
        return self.pick(ONSETS) + self.pick(VOWELS) + coda

    def invented(self):
        """One capitalised word that nobody has seen before."""
        word = self.syllable()
        if self.chance(0.15):
            word = word.lstrip("bcdfghjklmnpqrstvwxyz")
        if self.chance(0.35):
            word += self.syllable()
        if self.chance(0.6):
            word += self.pick(ENDINGS)
        return word.capitalize()

    def person(self):
        return self.invented() if self.chance(0.6) else f"{self.invented()} {self.invented()}"

    def place(self):
        draw = self.rng.random()
        if draw < 0.35:
            return f"{self.pick(FIRST_WORDS)} {self.pick(SECOND_WORDS)}"
        if draw < 0.6:
            return f"{self.invented()} {self.pick(SECOND_WORDS)}"
        if draw < 0.75:
            return f"{self.pick(FIRST_WORDS)} {self.invented()}"
        return self.invented()

    def amount(self):
        draw = self.rng.random()
        if draw < 0.4:
            return self.pick(NUMBER_WORDS)
        return str(self.rng.randint(2, 9999 if draw < 0.6 else 99))

    def thing(self):
        draw = self.rng.random()
        if draw < 0.5:
            return f"{self.pick(COLOURS)} {self.pick(NOUNS)}"
        return f"{self.pick(SIZES)} {self.pick(NOUNS)}"

    def dish(self):
        return f"{self.pick(FLAVOURS)} {self.pick(FOODS)}" if self.chance(0.6) else self.pick(FOODS)

    def fragment(self):
        """A piece of a word or a few odd letters, so that every token gets its turn."""
        if self.chance(0.3):
            return "".join(self.rng.choices(ODD_LETTERS, k=self.rng.randint(2, 6)))
        word = self.pick(self.pick(WORD_LISTS))
        start = self.rng.randrange(max(1, len(word) - 2))
        piece = word[start : start + self.rng.randint(2, 8)].strip()
        return piece.capitalize() if self.chance(0.3) else piece

    def value(self):
        """A value of a record: mostly a fresh name, otherwise a word or two."""
        draw = self.rng.random()
        if draw < 0.3:
            return self.place()
        if draw < 0.45:
            return self.person()
        makers = (
            self.thing,
            self.amount,
            self.dish,
            self.fragment,
            lambda: self.pick(KINDS),
            lambda: self.pick(AREAS),
            lambda: self.pick(PRICES),
            lambda: self.syllable() + self.syllable(),
            lambda: self.pick(DRINKS),
        )
        return self.pick(makers)()

    def distinct(self, make, count):
        """`count` different results of `make`."""
        found = []
        while len(found) < count:
            item = make()
            if item not in found:
                found.append(item)
        return found

    def some(self, words, count):
        return self.rng.sample(words, count)


def listed(items, joiner="and"):
    """`a, b and c`."""
    if len(items) == 1:
        return items[0]
    return f"{', '.join(items[:-1])} {joiner} {items[-1]}"


def errand(w):
    """A story about somebody who fetches something."""
    hero, helper = w.distinct(w.person, 2)
    home, goal = w.distinct(w.place, 2)
    thing, day = w.thing(), w.pick(DAYS)
    lines = [
        w.pick((
            f"On {day} {hero} left {home} to look for a {thing}.",
            f"{hero} lived in {home} and wanted a {thing}.",
            f"There was once a {w.pick(TRADES)} in {home} called {hero} who had lost a {thing}.",
        )),
        w.pick((
            f"The road to {goal} was long, and there was {w.pick(WEATHER)}.",
            f"The only {thing} was kept at {goal}.",
            f"A {w.pick(TRADES)} said that {helper} of {goal} had one.",
        )),
        w.pick((
            f"At {goal} {hero} met {helper}.",
            f"In {goal} lived a {w.pick(TRADES)} called {helper}.",
            f"{helper} was waiting at the gate of {goal}.",
        )),
        w.pick((
            f'"Take the {thing}," said {helper}, "and go back to {home}."',
            f'"What do you want?" asked {helper}. "A {thing}," said {hero}.',
            f"{helper} gave {hero} the {thing} and some {w.pick(FOODS)}.",
        )),
        w.pick((
            f"So {hero} carried the {thing} from {goal} to {home}.",
            f"{hero} thanked {helper} and was {w.pick(MOODS)}.",
            f"Back in {home} all were {w.pick(MOODS)}, and {hero} put the {thing} on the table.",
        )),
    ]
    if w.chance(0.5):
        lines.append(w.pick((
            f"To this day {hero} and {helper} are friends.",
            f"From then on {home} and {goal} were at peace.",
            f"{helper} still talks about {hero} of {home}.",
        )))
    return " ".join(lines)


def talk(w):
    """Two people talk, and repeat what the other said."""
    first, second = w.distinct(w.person, 2)
    lines = []
    for _ in range(w.rng.randint(2, 3)):
        value, place, third = w.value(), w.place(), w.person()
        lines += w.pick((
            (f'"Have you been to {place}?" asked {first}.',
             f'"{place}? Yes, {place} is where I saw {value}," said {second}.'),
            (f'"What is the name?" asked {first}.',
             f'"The name is {place}," said {second}. "You will find {place} near {value}."'),
            (f'"This kind of food is called {value}," said {first}.',
             f'"There is {value} in {place} too," said {second}.'),
            (f'"The word is {value}," said {first}.',
             f'"Did you say {value}?" asked {second}. "Yes, {value}."'),
            (f'{first} wrote to {second}: "Meet me at {place}."',
             f'{second} answered: "I will be at {place}."'),
            (f'"Who lives at {place}?" asked {second}.',
             f'"At {place} lives {third}," said {first}. "I see, {third} at {place}."'),
        ))
    return "\n".join(lines)


def notice(w):
    """A public notice that gives its facts twice."""
    place, person = w.place(), w.person()
    day, price, kind = w.pick(DAYS), w.pick(PRICES), w.pick(KINDS)
    return "\n".join((
        w.pick((f"NOTICE from {place}", f"To all who visit {place}", f"News of {place}")),
        w.pick((
            f"The {kind} at {place} will be closed on {day}.",
            f"A new {kind} opens on {day} at {place}.",
            f"On {day} {person} will speak at the {kind} of {place}.",
        )),
        w.pick((
            f"Ask for {person}. The price is {price}.",
            f"{person} keeps the {kind}; the cost is {price}.",
            f"Bring {w.pick(FOODS)} for {person}.",
        )),
        w.pick((
            f"Remember: {place}, {day}, {person}.",
            f"Do not come to {place} on {day} without a word to {person}.",
            f"By order of {person}, {place}.",
        )),
    ))


def letter(w):
    """A letter whose signature comes back in a reply."""
    sender, reader = w.distinct(w.person, 2)
    place, thing, food = w.place(), w.thing(), w.pick(FOODS)
    body = [
        w.pick((
            f"I am writing to you from {place}.",
            f"We came to {place} in {w.pick(MONTHS)}.",
            f"It is {w.pick(DAYS)} and there is {w.pick(WEATHER)} in {place}.",
        )),
        w.pick((
            f"They eat {food} here every day.",
            f"I have bought you a {thing}.",
            f"Please send me {w.amount()} crowns and some {food}.",
        )),
    ]
    text = f"Dear {reader},\n{' '.join(body)}\nYours, {sender}"
    if w.chance(0.6):
        text += f"\n\nDear {sender},\n" + w.pick((
            f"I was {w.pick(MOODS)} to hear from you. How is {place}?",
            f"So you are in {place}! I have never seen {place}.",
        )) + f"\nYours, {reader}"
    return text


def roll_call(w):
    """Values said once and then again in the same order: plain copying."""
    values = w.distinct(w.value, w.rng.randint(3, 7))
    first, second = w.distinct(w.person, 2)
    joined = w.pick((", ", " and ", " ; ", " , then ", " - ")).join(values)
    return w.pick((
        f"{first} called out {joined}. {second} repeated {joined}.",
        f"Heard: {joined}.\nWritten down: {joined}.",
        f"On the way there: {joined}. On the second day again {joined}.",
        f"{first} has {joined}, and {second} has {joined} too.",
        f"The song goes {joined}. Sing it again! It goes {joined}.",
    ))


def route(w):
    """A way through places, told stop by stop and then asked for."""
    stops = w.distinct(w.place, w.rng.randint(3, 5))
    walker = w.person()
    legs = [f"from {a} to {b}" for a, b in zip(stops, stops[1:])]
    text = w.pick((
        f"{walker} went {listed(legs, 'and then')}.",
        f"The road runs {listed(legs)}.",
        f"The coach goes {', '.join(legs)}.",
    ))
    if w.chance(0.5):
        text += f" The stops are {listed(stops)}."
    at = w.rng.randrange(len(stops) - 1)
    text += w.pick((
        f" After {stops[at]} comes {stops[at + 1]}.",
        f" Where does one go from {stops[at]}? To {stops[at + 1]}.",
        f" Before {stops[at + 1]} there is {stops[at]}.",
    ))
    return text


def recipe(w):
    """Ingredients, then steps that use each of them in turn."""
    foods = w.some(FOODS, w.rng.randint(3, 5))
    amounts = [w.amount() for _ in foods]
    cook = w.person()
    parts = [f"{n} spoons of {f}" for n, f in zip(amounts, foods)]
    verbs = w.some("wash chop boil fry mix stir bake salt cool serve".split(), len(foods))
    steps = [f"{v} the {f}" for v, f in zip(verbs, foods)]
    return (
        w.pick((f"The dish of {cook}", f"{cook} cooks", f"Supper with {cook}"))
        + f"\nYou need {listed(parts)}.\n"
        + w.pick((
            f"First {listed(steps, 'and then')}.",
            " ".join(s.capitalize() + "." for s in steps),
        ))
        + w.pick((f" {cook} eats it with {w.pick(DRINKS)}.", f" So says {cook}.", ""))
    )


def owners(w):
    """Who has what; then the same facts asked for or turned round."""
    count = w.rng.randint(2, 4)
    people, things = w.distinct(w.person, count), w.distinct(w.value, count)
    facts = list(zip(people, things))
    lines = [w.pick((f"{p} has the {t}.", f"The {t} is with {p}.")) for p, t in facts]
    asked = w.some(facts, w.rng.randint(1, count))
    for person, thing in asked:
        lines.append(w.pick((
            f"Who has the {thing}? {person}.",
            f"What does {person} have? The {thing}.",
            f"So {person} keeps the {thing}.",
        )))
    return " ".join(lines)


# Ways to write a record down. None of them is the way of the example data, so
# that an adapter has something to learn.
STYLES = (
    ("{k} = {v}", "\n"),
    ("{k} = {v}", " , "),
    ("- {k} is {v}", "\n"),
    ("{k} > {v}", "\n"),
    ("{v} ( {k} )", "\n"),
    ("{v} as {k}", ", "),
    ("the {k} is {v}", ", "),
    ("| {k} | {v} |", "\n"),
    ("* {k} * {v}", "\n"),
    ("{k} / {v}", " // "),
    ("{k} .. {v}", "\n"),
    ("# {k} {v}", " "),
    ("{k} -> {v}", "\n"),
)


def record(w, fewest=2, most=6):
    """A style, and fields with their values, written in that style."""
    fields = w.some(FIELDS, w.rng.randint(fewest, most))
    values = w.distinct(w.value, len(fields))
    return list(zip(fields, values))


def written(pairs, style):
    line, gap = style
    return gap.join(line.format(k=k, v=v) for k, v in pairs)


def form(w):
    """A record and questions about some of it."""
    pairs = record(w)
    text = written(pairs, w.pick(STYLES)) + "\n"
    for field, value in w.some(pairs, min(len(pairs), w.rng.randint(1, 3))):
        text += w.pick((
            f"What is the {field}? It is {value}.\n",
            f"Q. {field}? A. {value}\n",
            f"Tell me the {field}. {value}.\n",
            f"Which {field} has {value}? None but this.\n",
        ))
    return text.rstrip("\n")


PROSE = (
    ("The {k} is {v}", "the {k} is {v}"),
    ("With {v} for a {k}", "{v} for a {k}"),
    ("They chose {v} as the {k}", "{v} as the {k}"),
    ("I know that {v} is the {k}", "that {v} is the {k}"),
    ("Let {v} be the {k}", "let {v} be the {k}"),
    ("For the {k} we took {v}", "for the {k} {v}"),
    ("We saw {v}", "{v}"),
    ("It has {v}", "has {v}"),
)


def told(w, pairs):
    """A record told as a sentence or two, in the order of the record."""
    opening, later = w.pick(PROSE)
    cut = w.rng.randint(1, len(pairs))
    sentences = []
    for part in (pairs[:cut], pairs[cut:]):
        if part:
            (k, v), rest = part[0], part[1:]
            clauses = [opening.format(k=k, v=v)] + [later.format(k=a, v=b) for a, b in rest]
            sentences.append(listed(clauses) + ".")
    return " ".join(sentences)


def retold(w):
    """Records and their telling; a doc keeps to one style for all of its records."""
    style = w.pick(STYLES)
    mark = w.pick(("\n=> ", "\n\n", " ... ", "\nTold: ", "\nIn words: ", "\nThat is: "))
    texts = []
    for _ in range(w.rng.randint(1, 3)):
        pairs = record(w, 2, 5)
        texts.append(written(pairs, style) + mark + told(w, pairs))
    return "\n\n".join(texts)


def rewritten(w):
    """The same record in one style and then in another."""
    pairs = record(w, 3, 6)
    first, second = w.some(STYLES, 2)
    return written(pairs, first) + w.pick(("\n\n", "\nor\n", "\nthe same:\n")) + written(pairs, second)


def town(w):
    """A description of a town and its houses, with names that come back."""
    town_name, river = w.place(), w.invented()
    kind, food, area = w.pick(KINDS), w.dish(), w.pick(AREAS)
    owner, house = w.person(), w.place()
    return " ".join((
        w.pick((
            f"{town_name} lies on the river {river}.",
            f"The river {river} flows through {town_name}.",
            f"{town_name} is a town of {w.amount()} people.",
        )),
        w.pick((
            f"In its {area} stands a {kind} which is called {house}.",
            f"Its best {kind} is {house} in the {area}.",
            f"Near the {area} you can find {house}, a {kind}.",
            f"There is one {kind} in the {area}, and {house} is its name.",
            f"You will find no better {kind} than {house}, near the {area}.",
        )),
        w.pick((
            f"{owner} runs {house} and is known for {food}.",
            f"People come to {house} for {food} and {w.pick(DRINKS)}.",
            f"At {house} a plate of {food} is {w.pick(PRICES)}.",
            f"This is where {owner} serves {food}; they offer it to all.",
            f"It serves all kind of food, but most people want {food}.",
        )),
        w.pick((
            f"When {owner} is away, {house} stays shut.",
            f"All of {town_name} loves {house}.",
            f"Nobody in {town_name} has better {food} than {owner}.",
            f"The {area} of {town_name} is quiet at night.",
            f"There is no other {kind} in the area near {river}.",
            f"They offer a fair price to people from {town_name}.",
        )),
    ))


KIND_WEIGHTS = (
    (errand, 12), (talk, 12), (notice, 8), (letter, 8), (roll_call, 24), (route, 8),
    (recipe, 6), (owners, 8), (form, 10), (retold, 14), (rewritten, 8), (town, 10),
)


def documents(seed, count):
    """Yields `count` documents; the same seed gives the same documents."""
    writer = Writer(random.Random(seed))
    kinds, weights = zip(*KIND_WEIGHTS)
    for _ in range(count):
        yield writer.rng.choices(kinds, weights)[0](writer)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    with open(args.output, "w", encoding="utf-8", newline="\n") as out:
        for text in documents(args.seed, args.documents):
            out.write(f"{text}\n{END_OF_TEXT}\n")


if __name__ == "__main__":
    main()
