#!/usr/bin/env python3
"""Makes the example data: places/{train,valid,test}.jsonl and logbook.txt.

places: a record of three to six attributes as the prompt, one or two sentences
that mention every value word for word as the completion. Names in valid and
test occur nowhere in train, so they have to be copied from the prompt.
logbook: entries of a ship's log, for training on a style.

All of it comes from the templates and the seed in this file:

    python make_data.py --output .
"""

import argparse
import json
import pathlib
import random

SEED = 7
RECORDS = {"train": 2000, "valid": 200, "test": 200}
LOG_DAYS = 300

KINDS = (
    "teahouse;bakery;inn;tavern;chop house;noodle bar;soup kitchen;wine cellar;fish shop;"
    "coffee room;pie shop;dining hall"
).split(";")
AREAS = (
    "old harbour;market square;upper town;lower town;castle yard;north quarter;garden district;"
    "fish market;glass works;salt meadows;east docks;city wall"
).split(";")
FOODS = (
    "dumplings;noodles;pancakes;fish pies;onion soup;honey cake;oysters;crab stew;smoked trout;"
    "ham and eggs;beans and rice;plum tarts;mussels;waffles;mushroom curry;roast chestnuts"
).split(";")
PRICES = "modest;moderate;high;steep;five pence;ten pence;two shillings;three crowns;half a crown".split(";")

FIRST_WORDS = (
    "Copper Silver Golden Amber Scarlet Velvet Crooked Merry Quiet Lucky Sleepy Hungry Painted "
    "Hidden Humble Salty Rusty Misty Frosty Northern Upper Little Twisted Whistling Dancing Blue "
    "Green Red White Black Royal Brave Clever Sweet Warm Bright Hollow Stony Ginger Willow"
).split()
LAST_WORDS = (
    "Kettle Mill Anchor Bell Lantern Harp Barrel Fox Hare Badger Otter Heron Swan Raven Sparrow "
    "Salmon Whale Lion Stag Lamb Crown Wheel Hammer Needle Candle Spoon Ladle Basket Goblet Teapot "
    "Oven Hearth Bridge Tower Abbey Orchard Meadow Harbour Quay Island Oak Elm Rose Thistle Acorn "
    "Pear Plum Cherry Feather Button Compass Star Moon Cloud"
).split()
STEMS = (
    "Bram Tarn Oster Wend Marl Quill Dun Hazel Fen Kest Lorn Pell Rud Sal Thorn Ulver Vint Wick "
    "Ash Brind Cald Dray Ell Farn Gorm Holl Ing Jar Kell Lang"
).split()
ENDINGS = "ton ford by ham wick ley more dale field mouth stow combe worth gate beck shaw den".split()


def all_names(rng):
    """Every name the templates give, shuffled: two words, one word, or one of each."""
    towns = [stem + ending for stem in STEMS for ending in ENDINGS]
    names = [f"{a} {b}" for a in FIRST_WORDS for b in LAST_WORDS] + towns
    names += [f"{town} {word}" for town in towns[::3] for word in LAST_WORDS[::5]]
    rng.shuffle(names)
    return names


def split_names(rng):
    """Names for each file; no name is in two of them."""
    names = all_names(rng)
    return {"valid": names[:300], "test": names[300:600], "train": names[600:]}


def draw_record(rng, names):
    """An ordered record: the name and two to five of the other attributes."""
    name, near = rng.sample(names, 2)
    full = {
        "kind": rng.choice(KINDS),
        "area": rng.choice(AREAS),
        "near": near,
        "food": rng.choice(FOODS),
        "price": rng.choice(PRICES),
    }
    kept = set(rng.sample(list(full), rng.randint(2, 5)))
    return {"name": name} | {key: value for key, value in full.items() if key in kept}


def article(word):
    return "an" if word[0] in "aeiou" else "a"


def where(record):
    """` in the old harbour near North Mill`, or as much of it as the record has."""
    text = f" in the {record['area']}" if "area" in record else ""
    return text + (f" near {record['near']}" if "near" in record else "")


def first_sentence(rng, record):
    name, kind = record["name"], record.get("kind")
    if kind is None:
        return rng.choice((f"{name} is{where(record)}.", f"You will find {name}{where(record)}.")) \
            if where(record) else f"This is {name}."
    a_kind = f"{article(kind)} {kind}"
    return rng.choice((
        f"{name} is {a_kind}{where(record)}.",
        f"You will find {name}, {a_kind},{where(record)}." if where(record) else f"{name} is {a_kind}.",
        f"There is {a_kind} called {name}{where(record)}.",
    ))


def second_sentence(rng, record):
    food, price = record.get("food"), record.get("price")
    if food and price:
        return rng.choice((
            f" It serves {food} and the price is {price}.",
            f" They offer {food}; the price is {price}.",
        ))
    if food:
        return rng.choice((f" It serves {food}.", f" They offer {food}."))
    return f" The price is {price}." if price else ""


def prompt_of(record):
    return "; ".join(f"{key}: {value}" for key, value in record.items()) + " ->"


def completion_of(rng, record):
    text = " " + first_sentence(rng, record) + second_sentence(rng, record)
    missing = [value for value in record.values() if value not in text]
    if missing:
        raise SystemExit(f"the template for {record} leaves out {missing}")
    return text


def write_places(rng, folder):
    folder.mkdir(parents=True, exist_ok=True)
    seen = set()
    for split, names in split_names(rng).items():
        lines = []
        while len(lines) < RECORDS[split]:
            record = draw_record(rng, names)
            prompt = prompt_of(record)
            if prompt in seen:
                continue
            seen.add(prompt)
            lines.append(json.dumps({"prompt": prompt, "completion": completion_of(rng, record)}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


WINDS = "N NNE NE E SE SSE S SW WSW W NW NNW".split()
SKIES = "clear;overcast;rain;drizzle;fog;squalls;broken cloud;hail;haze;sleet".split(";")
SAILS = "fore topsail;main course;mizzen;jib;staysail;main topgallant;spanker;royals".split(";")
SIGHTS = "sail;light;wreck;whale;raft;buoy;berg;smoke;gulls;weed".split(";")
STORES = "water;biscuit;salt beef;peas;lamp oil;rope;coal;flour;rum;limes".split(";")
HANDS = "Tolley;Marrack;Finch;Oduya;Bligh;Sorensen;Pike;Abara;Quested;Lund".split(";")
TASKS = (
    "caulking deck;mending jib;scraping hull;splicing shrouds;tarring rigging;"
    "airing bedding;pumping bilge;painting boats"
).split(";")
MONTHS = (("Jan", 31), ("Feb", 28), ("Mar", 31), ("Apr", 30), ("May", 31), ("Jun", 30),
          ("Jul", 31), ("Aug", 31), ("Sep", 30), ("Oct", 31), ("Nov", 30), ("Dec", 31))


def watch_line(rng, hour):
    """One terse line of a watch: hour, wind, glass, and what was done or seen."""
    bearing = rng.choice(("port bow", "starboard bow", "port beam", "starboard beam", "astern", "ahead"))
    event = rng.choice((
        lambda: f"{rng.choice(('Set', 'Furled', 'Reefed', 'Split', 'Handed'))} {rng.choice(SAILS)}.",
        lambda: f"{rng.choice(SIGHTS).capitalize()} sighted, {bearing}, {rng.randint(1, 9)} m.",
        lambda: f"Hands {rng.choice(TASKS)}.",
        lambda: f"Pumped ship, {rng.randint(2, 30)} in.",
        lambda: f"{rng.choice(HANDS)} sick, off watch.",
        lambda: f"{rng.choice(HANDS)} relieved {rng.choice(HANDS)}.",
        lambda: f"Sounded {rng.randint(8, 90)} fm, {rng.choice(('sand', 'mud', 'shell', 'rock'))}.",
        lambda: "Nothing to report.",
    ))()
    glass = f"{rng.randint(284, 306) / 10:.1f} {rng.choice(('rising', 'falling', 'steady'))}"
    return f"{hour:02d}00 Wind {rng.choice(WINDS)} {rng.randint(0, 9)}, {rng.choice(SKIES)}. Bar {glass}. {event}"


def log_day(rng, number, month, day):
    lines = [f"Day {number}. {day} {month}. Lat {rng.randint(31, 58)} {rng.randint(0, 59):02d} N,"
             f" Long {rng.randint(5, 70)} {rng.randint(0, 59):02d} W."]
    hours = sorted(rng.sample(range(0, 24, 4), rng.randint(3, 5)))
    lines += [watch_line(rng, hour) for hour in hours]
    lines.append(f"Run {rng.randint(20, 210)} m. Issued {rng.choice(STORES)}. Pumps {rng.choice(('dry', 'sucking', 'fair'))}. All well.")
    return "\n".join(lines)


def write_logbook(rng, path):
    calendar = [(month, day) for month, days in MONTHS for day in range(1, days + 1)]
    days = [log_day(rng, number + 1, *calendar[number]) for number in range(LOG_DAYS)]
    path.write_text("\n\n".join(days) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("."))
    args = parser.parse_args()
    write_places(random.Random(SEED), args.output / "places")
    write_logbook(random.Random(SEED + 1), args.output / "logbook.txt")


if __name__ == "__main__":
    main()
