"""Everyday facts for the text-only items: short questions, each with one answer and plausible wrong ones.

A group shares one question template; the wrong options of an item are answers of other items of its group,
so that none stands out by its kind. Every fifth fact of a group is for training, the others are held out.
"""

from dataclasses import dataclass

TRAINING_EVERY = 5


@dataclass(frozen=True)
class Fact:
    """One question with its right answer and the answers that would be of the right kind but wrong."""

    kind: str
    question: str
    answer: str
    wrong: tuple[str, ...]


# kind: (question template, "key=answer, key=answer, …")
_GROUPS: dict[str, tuple[str, str]] = {
    "capital": (
        "What is the capital of {}?",
        "France=Paris, Italy=Rome, Spain=Madrid, Germany=Berlin, Japan=Tokyo, China=Beijing, "
        "Russia=Moscow, Egypt=Cairo, Greece=Athens, Portugal=Lisbon, Austria=Vienna, Ireland=Dublin, "
        "Norway=Oslo, Sweden=Stockholm, Denmark=Copenhagen, Finland=Helsinki, Poland=Warsaw, "
        "Hungary=Budapest, Cuba=Havana, Peru=Lima, Chile=Santiago, Kenya=Nairobi, Thailand=Bangkok, "
        "Turkey=Ankara, Canada=Ottawa, Iraq=Baghdad, Iran=Tehran, Belgium=Brussels, the United "
        "Kingdom=London, South Korea=Seoul",
    ),
    "continent": (
        "On which continent is {}?",
        "Kenya=Africa, Brazil=South America, China=Asia, France=Europe, Canada=North America, "
        "Egypt=Africa, India=Asia, Spain=Europe, Argentina=South America, Mexico=North America, "
        "Nigeria=Africa, Japan=Asia, Germany=Europe, Peru=South America, Ghana=Africa, Vietnam=Asia, "
        "Sweden=Europe, Chile=South America, Morocco=Africa, Thailand=Asia",
    ),
    "language": (
        "Which language do most people speak in {}?",
        "France=French, Germany=German, Italy=Italian, Brazil=Portuguese, Mexico=Spanish, "
        "Japan=Japanese, Russia=Russian, Greece=Greek, Poland=Polish, Egypt=Arabic, Sweden=Swedish, "
        "Turkey=Turkish, Australia=English, Argentina=Spanish, Austria=German",
    ),
    "young": (
        "What do you call a baby {}?",
        "dog=puppy, cat=kitten, cow=calf, horse=foal, sheep=lamb, deer=fawn, pig=piglet, duck=duckling, "
        "goose=gosling, lion=cub, frog=tadpole, kangaroo=joey, bear=cub, chicken=chick, elephant=calf",
    ),
    "sound": (
        "Which sound does a {} make?",
        "dog=bark, cat=meow, cow=moo, lion=roar, snake=hiss, duck=quack, bee=buzz, pig=oink, sheep=baa, "
        "wolf=howl, owl=hoot, horse=neigh",
    ),
    "opposite": (
        "What is the opposite of {}?",
        "hot=cold, big=small, up=down, fast=slow, happy=sad, day=night, open=closed, old=young, "
        "light=dark, full=empty, wet=dry, early=late, left=right, rich=poor, hard=soft, long=short, "
        "high=low, strong=weak, good=bad, love=hate, war=peace, true=false, first=last, clean=dirty, "
        "alive=dead, north=south, thick=thin, win=lose, buy=sell, push=pull, begin=end, inside=outside, "
        "above=below, heavy=light, easy=difficult",
    ),
    "color": (
        "What color is {}?",
        "grass=green, snow=white, coal=black, a ripe banana=yellow, blood=red, the clear sky=blue, a "
        "carrot=orange, an elephant=gray, chocolate=brown, an eggplant=purple, a ripe tomato=red, a "
        "lemon=yellow, milk=white, a flamingo=pink, a crow=black",
    ),
    "sum": (
        "What is {}?",
        "1 + 1=2, 2 + 3=5, 4 + 4=8, 5 + 1=6, 3 + 4=7, 2 + 1=3, 5 + 5=10, 6 + 3=9, 2 + 2=4, 10 + 2=12, 7 "
        "+ 4=11, 9 + 9=18, 10 + 10=20, 8 + 7=15, 6 + 7=13, 10 - 5=5, 9 - 1=8, 7 - 3=4, 8 - 6=2, 6 - 5=1",
    ),
    "day": (
        "Which day comes right after {}?",
        "Monday=Tuesday, Tuesday=Wednesday, Wednesday=Thursday, Thursday=Friday, Friday=Saturday, "
        "Saturday=Sunday, Sunday=Monday",
    ),
    "month": (
        "Which month comes right after {}?",
        "January=February, February=March, March=April, April=May, May=June, June=July, July=August, "
        "August=September, September=October, October=November, November=December, December=January",
    ),
    "amount": (
        "How many {}?",
        "days are in a week=7, months are in a year=12, hours are in a day=24, minutes are in an "
        "hour=60, legs does a spider have=8, days are in a leap year=366, sides does a triangle have=3, "
        "wheels does a bicycle have=2, legs does an insect have=6, letters are in the English "
        "alphabet=26, centimeters are in a meter=100, years are in a century=100, eggs are in a "
        "dozen=12, fingers are on one hand=5, players are in a soccer team=11, legs does a horse have=4",
    ),
    "category": (
        "What kind of thing is {}?",
        "a hammer=tool, an apple=fruit, a rose=flower, a violin=instrument, a salmon=fish, an "
        "eagle=bird, a carrot=vegetable, a car=vehicle, gold=metal, an oak=tree, a screwdriver=tool, a "
        "banana=fruit, a tulip=flower, a piano=instrument, a shark=fish, a sparrow=bird, a "
        "potato=vegetable, a truck=vehicle, iron=metal, a pine=tree, an ant=insect, a shirt=clothing, a "
        "chair=furniture, tennis=sport, a flute=instrument, a grape=fruit, copper=metal, a bee=insect, "
        "a table=furniture, a jacket=clothing, a daisy=flower, an onion=vegetable, football=sport, a "
        "bus=vehicle",
    ),
    "past": (
        "What is the past tense of the verb {}?",
        "go=went, eat=ate, see=saw, run=ran, take=took, come=came, write=wrote, drink=drank, give=gave, "
        "buy=bought, sing=sang, speak=spoke, know=knew, think=thought, fly=flew",
    ),
    "body": (
        "With which part of the body do people {}?",
        "see=the eyes, hear=the ears, smell=the nose, taste=the tongue, walk=the legs, chew=the teeth, "
        "think=the brain, breathe=the lungs, hold things=the hands, pump blood=the heart",
    ),
    "symbol": (
        "Which chemical element has the symbol {}?",
        "H=hydrogen, O=oxygen, C=carbon, N=nitrogen, Au=gold, Ag=silver, Fe=iron, He=helium, Na=sodium, "
        "Cu=copper, Pb=lead, Ca=calcium, Zn=zinc, Cl=chlorine, Hg=mercury",
    ),
    "work": (
        "Where does a {} usually work?",
        "teacher=in a school, doctor=in a hospital, farmer=on a farm, chef=in a kitchen, pilot=on a "
        "plane, sailor=on a ship, judge=in a court, actor=in a theater, librarian=in a library, "
        "cashier=in a shop",
    ),
    "purpose": (
        "What is {} used for?",
        "a knife=cutting, a pen=writing, an oven=baking, a broom=sweeping, a needle=sewing, a "
        "bed=sleeping, soap=washing, a clock=telling time, a camera=taking pictures, an "
        "umbrella=keeping dry, a shovel=digging, a kettle=boiling water, a brush=painting, a "
        "ruler=measuring, a phone=calling people",
    ),
    "author": (
        "Who {}?",
        "wrote Hamlet=William Shakespeare, painted the Mona Lisa=Leonardo da Vinci, discovered "
        "gravity=Isaac Newton, developed the theory of relativity=Albert Einstein, was the first "
        "president of the United States=George Washington, wrote Oliver Twist=Charles Dickens, invented "
        "the telephone=Alexander Graham Bell, proposed the theory of evolution=Charles Darwin, wrote "
        "Pride and Prejudice=Jane Austen, was the first person on the Moon=Neil Armstrong",
    ),
}


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(key.strip(), answer) for key, answer in (pair.split("=") for pair in text.split(","))]


def _group_facts(kind: str) -> list[Fact]:
    template, text = _GROUPS[kind]
    pairs = _pairs(text)
    answers = tuple(dict.fromkeys(answer for _, answer in pairs))
    return [Fact(kind, template.format(key), answer, tuple(a for a in answers if a != answer)) for key, answer in pairs]


def training_facts() -> list[Fact]:
    """The facts a training set may state: every fifth of each group."""
    return [fact for kind in _GROUPS for fact in _group_facts(kind)[TRAINING_EVERY - 1 :: TRAINING_EVERY]]


def held_out_facts() -> list[Fact]:
    """The facts a benchmark may ask: disjoint from :func:`training_facts`."""
    return [
        fact
        for kind in _GROUPS
        for index, fact in enumerate(_group_facts(kind))
        if index % TRAINING_EVERY != TRAINING_EVERY - 1
    ]
