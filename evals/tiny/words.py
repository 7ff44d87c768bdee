"""Names and things of the word problems."""

from __future__ import annotations

_HE = (
    "James Liam Noah Ethan Lucas Mason Logan Oliver Henry Owen Jack Leo Adam Ben Carl David Eric Frank George Hugo"
    " Ivan Jake Kevin Luke Mark Nick Oscar Paul Ryan Sam Tom Victor Will Omar Raj Wei Diego Ahmed Pedro Kofi"
)
_SHE = (
    "Emma Olivia Ava Sophia Mia Amelia Harper Ella Grace Chloe Lily Zoe Nora Hannah Alice Betty Clara Diana Eva Fiona"
    " Gina Helen Irene Julia Karen Laura Maria Nina Paula Rosa Sara Tina Vera Wendy Yara Priya Mei Lucia Fatima Amara"
)
NAMES = tuple((name, "he", "his") for name in _HE.split()) + tuple((name, "she", "her") for name in _SHE.split())
_THINGS = (
    "apples oranges pencils stickers marbles books cookies cards shells stamps beads buttons coins crayons eggs flowers"
    " lemons peaches muffins balloons cupcakes magnets ribbons toys candles pens notebooks candies plums"
)
THINGS = tuple(_THINGS.split())
PLURALS = {
    "box": "boxes",
    "bag": "bags",
    "basket": "baskets",
    "jar": "jars",
    "tray": "trays",
    "shelf": "shelves",
    "drawer": "drawers",
    "pack": "packs",
    "bin": "bins",
    "shirt": "shirts",
    "hat": "hats",
    "mug": "mugs",
    "lamp": "lamps",
    "scarf": "scarves",
    "ball": "balls",
    "puzzle": "puzzles",
    "cap": "caps",
    "plate": "plates",
    "towel": "towels",
    "pillow": "pillows",
    "brush": "brushes",
}
CONTAINERS = ("box", "bag", "basket", "jar", "tray", "shelf", "drawer", "pack", "bin")
GOODS = ("shirt", "hat", "mug", "lamp", "scarf", "ball", "puzzle", "cap", "plate", "towel", "pillow", "brush")
PLACES = ("school", "park", "library", "market", "museum", "farm", "shop", "zoo", "bakery", "garden")
