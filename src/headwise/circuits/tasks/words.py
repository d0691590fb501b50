"""The words that the tasks' prompts are filled from."""

from __future__ import annotations

NAMES = (
    "Mary John Anna Tom James Paul Sarah David Peter Emma Mark Laura Simon Alice Kevin Lucy George Helen Robert Susan "
    "Daniel Jack Kate Martin Sam Adam Rachel Michael Julia Steve Maria Henry Jane Frank Rose Charles Ruth Andrew"
).split()
PLACES = "store park school station library garden office market restaurant museum hotel beach hospital bank".split()
GIFTS = "drink book ring letter flower ball gift kiss map coin cake toy pen ticket".split()

# singular and plural
NOUNS = [
    ("key", "keys"), ("book", "books"), ("picture", "pictures"), ("teacher", "teachers"), ("car", "cars"),
    ("letter", "letters"), ("student", "students"), ("house", "houses"), ("doctor", "doctors"), ("tree", "trees"),
    ("cat", "cats"), ("dog", "dogs"), ("table", "tables"), ("bird", "birds"), ("window", "windows"),
    ("road", "roads"), ("machine", "machines"), ("song", "songs"), ("river", "rivers"), ("door", "doors"),
    ("king", "kings"), ("girl", "girls"), ("boy", "boys"), ("box", "boxes"),
]  # fmt: skip
PREPOSITIONS = "near behind beside above under below".split()
AUXILIARIES = [("is", "are"), ("was", "were"), ("has", "have")]  # singular and plural

COLOURS = "red blue green yellow white black brown pink purple gray".split()
OBJECTS = "pen cup book car door chair hat box ball lamp bag coat key shirt bottle plate table flag boat bird".split()

# words without much relation to each other, for sequences that only their repetition makes predictable
UNRELATED = (
    "lamp river stone cloud chair paper horse garden winter bottle silver letter market window forest button engine "
    "butter planet candle desert hammer island jacket kitchen ladder mirror needle orange pencil rabbit saddle "
    "tunnel valley wagon yellow anchor basket camera dinner finger guitar hotel insect juice knife lemon monkey "
    "north ocean pepper queen rocket school table uncle village water zero bridge carpet doctor eagle flower glass"
).split()

# ordered sets; True where the first follows the last
SEQUENCES = [
    ("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(), True),
    (
        "January February March April May June July August September October November December".split(),
        True,
    ),
    ("one two three four five six seven eight nine ten eleven twelve".split(), False),
    ("first second third fourth fifth sixth seventh eighth ninth tenth".split(), False),
    ([*"ABCDEFGHIJKLMNOPQRSTUVWXYZ"], False),
    ([str(number) for number in range(1, 30)], False),
]

EVENTS = "war siege project festival drought journey trial strike voyage conflict reign campaign debate study".split()
