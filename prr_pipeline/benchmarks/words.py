# SPDX-License-Identifier: Apache-2.0
"""The words, numbers and names that synthetic tasks are made of, drawn from a seeded generator.

No word of the lists is part of another one: an answer that is looked for as a substring can only be
found as itself. Each generator yields the same values in the same order whatever number of them is
taken, so that a longer text is a shorter one with more in it.
"""

import random
import uuid
from collections.abc import Callable, Iterator
from itertools import islice

_NOUNS = """
    acorn airport almond amulet anchor angle ankle antler anvil apple apron arch attic autumn avenue
    badger bakery balcony ballad bamboo banana banjo banner barley barrel basin basket beacon beaver
    bell bench berry bicycle bishop blanket blossom bottle boulder bouquet bracelet bramble branch
    breeze brick bridge bronze broom bubble bucket buckle buffalo bugle bundle burrow button cabbage
    cabin cable cactus camel camera canal candle canoe canvas canyon caravan carrot castle cavern
    cedar cello cherry chestnut chimney cinema circus citrus clarinet clover cobble coconut comet
    compass copper coral cottage cotton cradle crane crater crayon cricket crow crystal cupboard
    curtain cushion cypress daisy dancer dawn delta desert diamond dinner dolphin donkey door dragon
    drawer drum duck dune eagle echo elbow elephant ember emerald engine envelope evening falcon
    farmer feather fence fennel ferry fiddle field finch flame flask flute fog forest fossil
    fountain fox freckle frost galaxy gallery garden garlic garnet gate gazelle geyser ginger
    giraffe glacier globe glove goblet goose gorge granite grape gravel grove guitar gull hammer
    hammock harbor harvest hawk hazel helmet hermit heron hinge hockey honey horizon hornet hotel
    iceberg igloo indigo inlet insect iris island ivory ivy jacket jaguar jasmine jelly jewel jigsaw
    jungle juniper kayak kernel kettle kitchen kite kitten knight label lagoon lake lantern lapel
    lavender leaf ledger lemon lentil library lilac lizard llama lobster locket lotus lumber lynx
    magnet maple marble market marsh meadow melon mesa mill mineral mirror mitten mosaic moth
    mountain muffin museum mushroom mustard napkin nectar needle noodle nutmeg oasis oboe ocean
    olive onion opal orbit orchid otter oven oxygen oyster paddle palace pancake panther papaya
    parcel parrot pasture peach pebble pelican pencil pepper piano picnic pigeon pillow pine pirate
    planet plaza plum pocket poem pony poplar poppy potato prairie pretzel prism pumpkin puppet
    puzzle pyramid quail quarry quartz quill quilt rabbit radish raft raven reef ribbon riddle river
    robin rocket rooster ruby saddle saffron sailor salmon sandal sapphire satchel saucer scarf
    school seagrass sequoia shadow shelf shell shovel shrimp signal silk sketch sleigh sloth snail
    sparrow spinach spoon squash squid stable statue stove straw stream sugar sunset swan sweater
    tailor tapestry teapot temple thimble thistle throne thunder ticket tiger timber toast tomato
    topaz torch tortoise tower tractor treasure trumpet tulip tundra tunnel turnip turtle umbrella
    uncle unicorn valley vase velvet vessel village vine violin vulture waffle wagon walnut walrus
    water weasel whale whistle willow window winter wizard wolf woodland wren yacht yogurt zebra
    zephyr zinc
"""

_ADJECTIVES = """
    agile alert amber ample ancient azure bashful basic blue blunt bold bossy brave brief bright
    brisk broad busy calm candid careful casual cheerful chilly civil clean clear clever cold cool
    cosmic cozy crisp curious curly daring dear deep dizzy dusty eager early earnest easy elder
    elegant empty exact faint fair famous fancy fast fierce fine firm flat fond formal frank free
    fresh frugal funny fuzzy gentle giant glad global golden good grand gray great green happy hardy
    hasty heavy hidden high hollow honest huge humble hungry ideal idle jolly joyful keen kind large
    late lazy light little lively lofty lone loud loyal lucky lunar magic major merry mighty mild
    modern modest muddy narrow neat new nimble noble noisy novel odd open orange pale patient plain
    playful polite proud pure purple quick quiet rapid rare ready rich ripe rough round royal rustic
    salty scarce secret serene sharp shiny short shy silent silly silver simple slim slow small
    smart smooth snowy soft solar solid spare spicy steady steep stern still strong sturdy subtle
    sunny super sweet swift tall tame tender thin tidy tiny tired tough true upper urban useful
    vague valid vast violet vivid warm weary wet white wide wild wise witty wooden young zesty
"""

NOUNS = tuple(_NOUNS.split())
ADJECTIVES = tuple(_ADJECTIVES.split())
PLAIN = tuple(sorted(NOUNS + ADJECTIVES))
MAX_COMPOUNDS = len(NOUNS) * len(ADJECTIVES) * 9 // 10  # beyond, drawing distinct ones is slow


def compounds(rng: random.Random, count: int, avoid: frozenset[str] = frozenset()) -> list[str]:
    """Draw distinct pairs such as "brave-otter"; no part of them is in avoid.

    Raises:
        ValueError: more than MAX_COMPOUNDS are asked for.
    """
    if count > MAX_COMPOUNDS:
        raise ValueError(f"{count} compounds asked for, {MAX_COMPOUNDS} can be drawn")

    def pair() -> str:
        while True:
            adjective, noun = rng.choice(ADJECTIVES), rng.choice(NOUNS)
            if adjective not in avoid and noun not in avoid:
                return f"{adjective}-{noun}"

    return list(islice(_distinct(pair), count))


def numbers(rng: random.Random, count: int, digits: int = 7) -> list[str]:
    """Draw distinct decimal numbers without a leading zero."""
    low, high = 10 ** (digits - 1), 10**digits - 1
    return list(islice(_distinct(lambda: str(rng.randint(low, high))), count))


def uuids(rng: random.Random, count: int) -> list[str]:
    """Draw distinct version 4 UUIDs."""
    return list(islice(_distinct(lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4))), count))


def letters(rng: random.Random, count: int, size: int, alphabet: str) -> list[str]:
    """Draw distinct strings of size letters."""
    return list(islice(_distinct(lambda: "".join(rng.choices(alphabet, k=size))), count))


def _distinct(draw: Callable[[], str]) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        value = draw()
        if value not in seen:
            seen.add(value)
            yield value
