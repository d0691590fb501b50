"""Winograd schemas: one word decides which of two nouns a pronoun stands for, by meaning alone."""

from __future__ import annotations

from typing import NamedTuple


class Schema(NamedTuple):
    """{a} and {b} stand for the two nouns; the pronoun is a when the first ending follows, b for the second."""

    text: str
    a: tuple[str, ...]
    b: tuple[str, ...]
    endings: tuple[tuple[str, str], ...]


def _schema(text: str, a: str, b: str, *endings: str) -> Schema:
    pairs = tuple((first, second) for first, second in (ending.split("/") for ending in endings))
    return Schema(text, tuple(a.split()), tuple(b.split()), pairs)


# "^" marks the nouns, the pronoun and, in an ending, the word that decides
SCHEMAS = (
    _schema("The {a}^a didn't cross the {b}^b because it^p was too {end} .", "animal dog horse cat goat donkey",
            "street road river bridge", "tired^d/wide^d", "weak^d/long^d", "old^d/dangerous^d"),
    _schema("They could not push the {a}^a through the {b}^b because it^p was too {end} .",
            "piano sofa wardrobe table bed", "door gate window tunnel", "wide^d/narrow^d", "large^d/small^d"),
    _schema("The {a}^a could not pass under the {b}^b because it^p was too {end} .", "truck bus ship van boat",
            "bridge arch gate", "high^d/low^d", "tall^d/low^d"),
    _schema("The {a}^a could not cut the {b}^b because it^p was too {end} .", "knife saw axe blade razor",
            "rope bread branch wire leather", "blunt^d/thick^d", "dull^d/hard^d"),
    _schema("The {a}^a could not pull the {b}^b because it^p was too {end} .", "donkey horse ox pony dog",
            "cart wagon plough sledge", "weak^d/heavy^d", "tired^d/heavy^d", "small^d/full^d"),
    _schema("The {a}^a did not catch the {b}^b because it^p was too {end} .", "dog fox wolf lion cat",
            "rabbit deer mouse hare bird", "slow^d/fast^d", "tired^d/clever^d", "lazy^d/quick^d"),
    _schema("The {a}^a did not light the whole {b}^b because it^p was too {end} .", "lamp candle torch lantern",
            "hall cave cellar church", "weak^d/large^d", "dim^d/deep^d"),
    _schema("There was no room for the {a}^a on the {b}^b because it^p was too {end} .",
            "vase statue box radio cake", "shelf table tray ledge", "large^d/small^d", "wide^d/narrow^d"),
    _schema("The {a}^a cracked the {b}^b because it^p was so {end} .", "stone hammer rock brick",
            "mirror window plate cup", "hard^d/thin^d", "heavy^d/fragile^d"),
    _schema("The {a}^a ate the {b}^b because it^p was {end} .", "goat dog bear fox pig", "apple cake bread cheese pie",
            "hungry^d/delicious^d", "greedy^d/fresh^d", "starving^d/sweet^d"),
    _schema("The {a}^a warned the {b}^b because she^p {end} the mountain .", "guide farmer hunter",
            "tourist visitor guest", "knew^d/underestimated^d", "had explored^d/had misjudged^d"),
    _schema("The {a}^a paid the {b}^b because he^p had {end} the wool .", "tailor weaver trader",
            "farmer shepherd dealer", "ordered^d/delivered^d", "bought^d/sold^d"),
    _schema("The {a}^a hired the {b}^b because he^p {end} .", "farmer baker merchant", "cook clerk helper",
            "needed help^d/needed work^d", "was overworked^d/was unemployed^d"),
    _schema("The {a}^a asked the {b}^b for directions because she^p {end} the town .", "tourist driver stranger",
            "porter waitress guard", "hardly^d knew/really^d knew", "had just reached^d/had long known^d"),
)  # fmt: skip
