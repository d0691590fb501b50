"""The vocabulary of the probe sentences, by use."""

from __future__ import annotations

PEOPLE = (
    "teacher doctor farmer painter soldier nurse lawyer singer baker sailor pilot writer judge tailor gardener "
    "dentist hunter waiter driver student manager guard actor dancer plumber reporter librarian builder"
).split()
OBJECTS = (
    "key lamp book chair picture bottle clock basket blanket radio mirror hammer ladder suitcase umbrella bucket "
    "plate drum bell pillow bicycle camera candle carpet kettle map guitar helmet painting statue"
).split()
PLACES = (
    "garden kitchen library garage museum office village school station market hotel castle harbour church cellar "
    "hospital theatre factory tower bakery"
).split()
NEAR = "near beside behind".split()
STATES = "old new dirty clean expensive heavy cheap ugly beautiful useful dusty famous".split()
COLOURS = "red green blue yellow black white brown grey".split()
SIZES = "small large tiny huge heavy strange".split()
PLAIN_COLOURS = "black white brown grey".split()  # that an animal may have too
CHARACTERS = "young old tall clever honest lazy polite nervous famous tired rich lonely".split()
IDLE = (("wait", "waits"), ("sleep", "sleeps"), ("work", "works"), ("sing", "sings"), ("laugh", "laughs"),
        ("complain", "complains"), ("rest", "rests"), ("argue", "argues"))  # fmt: skip
OFTEN = "often always never rarely usually sometimes".split()
MANNERS = "quickly slowly carefully quietly finally secretly".split()
LIKES = (("like", "likes"), ("know", "knows"), ("admire", "admires"), ("avoid", "avoids"), ("remember", "remembers"))
TIMES = (
    "", "Last week ", "After lunch ", "In the end ", "On Monday ", "As always ", "Before the storm ", "In those days ",
)  # fmt: skip
# verb in the past, and things that this is done to
DEEDS = {
    "repaired": "clock radio bicycle fence roof engine camera lamp".split(),
    "bought": "ladder carpet guitar blanket horse house painting camera".split(),
    "painted": "fence door wall gate boat chair".split(),
    "carried": "basket suitcase ladder bucket drum box".split(),
    "opened": "window door letter bottle gate box".split(),
    "washed": "car shirt plate blanket window dog".split(),
    "found": "key map ring umbrella letter wallet".split(),
    "sold": "horse house boat carpet painting clock".split(),
    "broke": "mirror plate window vase lamp cup".split(),
    "hid": "letter key ring map wallet bottle".split(),
    "watched": "film game race parade storm".split(),
    "drew": "tree horse castle bridge ship map".split(),
}
LASTING = "slept waited sat stood talked hid".split()  # what one may do for hours
# verb in the past, prepositions after it, and what may follow these
WAYS = (
    ("slept", "under behind near".split(), "tree table bridge wall blanket".split()),
    ("walked", "through across around past".split(), "forest park village garden field".split()),
    ("waited", "at near behind outside".split(), "station gate theatre bridge hotel".split()),
    ("hid", "under behind inside".split(), "bed door stairs house curtain".split()),
    ("sat", "on near beside under".split(), "bench wall tree bridge roof".split()),
    ("ran", "towards past around into".split(), "station house school harbour forest".split()),
    ("stood", "before beside behind near".split(), "mirror statue church fence window".split()),
    ("talked", "about".split(), "film weather price race storm".split()),
    ("looked", "at behind under".split(), "picture map clock statue table".split()),
)
ANIMALS = "cat dog horse rabbit child soldier boy girl monkey goat".split()
OWNED = "car house dog garden boat bicycle coat piano kitchen horse umbrella office".split()
PARTS = {
    "roof": "house church barn castle cottage".split(),
    "door": "garage kitchen cellar car castle".split(),
    "cover": "book pool album box notebook".split(),
    "colour": "curtain carpet wall car dress".split(),
    "owner": "shop hotel farm boat garden".split(),
    "price": "ticket house camera ring horse".split(),
    "end": "story film road winter war".split(),
    "author": "book letter play song poem".split(),
}
WOMEN = "Anna Maria Julia Emma Laura Sarah Helen Alice Clara Susan Linda Nora".split()
MEN = "Peter Paul Daniel Martin Oliver Simon Victor Henry Robert David Albert Oscar".split()
TELLING = "told reminded assured warned informed".split()
SECRETS = (
    "had lost the key", "was moving to another town", "had sold the old house", "would be late", "had won the race",
    "was afraid of the dark", "had forgotten the tickets", "would cook on Sunday", "had found a new job",
    "could not sing",
)  # fmt: skip
# a word and one that means its kind, or the same
KINDS = (
    ("car", "vehicle"), ("bus", "vehicle"), ("tiger", "animal"), ("horse", "animal"), ("rose", "flower"),
    ("tulip", "flower"), ("hammer", "tool"), ("saw", "tool"), ("oak", "tree"), ("pine", "tree"),
    ("piano", "instrument"), ("violin", "instrument"), ("salmon", "fish"), ("trout", "fish"), ("eagle", "bird"),
    ("swan", "bird"), ("apple", "fruit"), ("pear", "fruit"), ("coat", "garment"), ("shirt", "garment"),
    ("ruby", "jewel"), ("diamond", "jewel"), ("rifle", "weapon"), ("sword", "weapon"), ("doctor", "physician"),
    ("ship", "vessel"), ("house", "building"), ("tower", "building"), ("novel", "book"), ("beetle", "insect"),
    ("wasp", "insect"), ("lawyer", "attorney"), ("thief", "criminal"), ("cottage", "dwelling"),
)  # fmt: skip
QUALITIES = "big strange famous beautiful old rare splendid".split()  # of living beings and of things
# an effect (^e) and what brought it about (^c)
CAUSES = (
    ("the street was wet^e", "it had rained^c all night"),
    ("the child cried^e", "the ice cream had fallen^c on the ground"),
    ("the plants died^e", "nobody had watered^c them"),
    ("the guests left^e early", "the music was too loud^c"),
    ("the river rose^e", "the snow had melted^c in the mountains"),
    ("the train stopped^e", "a tree had fallen^c on the rails"),
    ("the shop closed^e", "its customers stayed^c away"),
    ("the team celebrated^e", "it had won^c the final"),
    ("the kitchen smelled^e of smoke", "the bread had burned^c in the oven"),
    ("the driver braked^e", "a deer stood^c on the road"),
    ("the lights failed^e", "lightning had struck^c the mast"),
    ("the boat sank^e", "it had hit^c a rock"),
    ("the boy limped^e", "he had twisted^c his ankle"),
    ("the audience laughed^e", "the clown had slipped^c on a banana"),
    ("bread became expensive^e", "the harvest had failed^c"),
    ("the milk turned sour^e", "it had stood^c in the sun"),
    ("the alarm rang^e", "a thief had broken^c the window"),
    ("the lake froze^e", "the nights were bitterly cold^c"),
    ("the student failed^e the exam", "she had not studied^c at all"),
    ("the bridge collapsed^e", "the flood had weakened^c its pillars"),
    ("the dog barked^e", "a stranger knocked^c at the gate"),
    ("the crops withered^e", "the drought lasted^c for months"),
    ("the baby slept^e badly", "the neighbours were shouting^c"),
    ("the runner drank^e a whole bottle", "he was thirsty^c"),
    ("the fire spread^e", "a strong wind was blowing^c"),
    ("the soup tasted awful^e", "the cook had forgotten^c the salt"),
)
