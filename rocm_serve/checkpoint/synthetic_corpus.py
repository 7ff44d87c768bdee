"""A small text to train the synthetic tokenizer on: English, arithmetic, a little code, and non-ASCII text. Pure."""

from __future__ import annotations

from collections.abc import Iterator

_WORDS = """
the of and to a in is that for it was on with as be at by this had not are but from or have an they which one you were
all her she there would their we him been has when who will no more if out so up said what its about than into them can
only other time new some could these two may first then do any like my now over such our man me even most made after
also did many off before must well back through years much where your way down should because long each just state
those people too mister how little good world make very year still see own work men day get here old life both between
being under three never know same last another while us might great go come since against right came take used himself
few house use place during high without again home around small however found mother part once say thought went
question answer problem number total how many each buys sells gives gets eats pays costs price dollars cents money
apples oranges eggs books pens pencils boxes bags bottles marbles stickers cookies cakes flowers trees chickens cows
students teacher class school team game points score hours minutes seconds days weeks months miles meters feet inches
pounds gallons liters twice half third quarter double triple more less than fewer sum difference product quotient
remainder percent average rate speed distance length width height area volume weight left remaining together equally
share split divide multiply add subtract equals plus minus times step therefore so first second third finally let us
think calculate compute find write check result correct wrong true false value variable equation solve simple
friend brother sister father family children baby garden farm market store shop kitchen table chair window door room
morning afternoon evening night week Monday Tuesday Friday Saturday Sunday January March June October December
red blue green yellow white black orange purple big large tiny short tall fast slow early late happy sad hungry
water milk juice coffee tea bread butter cheese sugar flour rice pasta fish meat chicken soup salad pizza
car bus train plane boat bicycle truck road street city town village country river lake mountain ocean island forest
computer program function return print string integer list file system memory server model token layer weight data
user assistant system message tool call response reasoning thinking content name type parameter description required
January city weather temperature degrees celsius sunny rainy cloudy forecast today tomorrow yesterday
John Mary James Sarah Michael Emma David Olivia Daniel Sophia Peter Anna Robert Julia Thomas Laura Janet Natalia
running walking reading writing playing cooking baking driving working sleeping eating drinking buying selling making
government national public business company service market percent increase decrease production development research
information important different possible available necessary following general history language science mathematics
example explain because reason understand believe remember forget learn teach study practice exercise homework
although however moreover furthermore nevertheless meanwhile otherwise perhaps probably certainly actually usually
approximately exactly nearly almost already always sometimes often rarely never together separately
"""

_SENTENCES = """
How many apples does Mary have left after she gives away half of them?
Let us think step by step. First, find the total cost of the books.
He has 12 boxes with 8 pencils in each box, so he has 12 * 8 = <<12*8=96>>96 pencils.
The train travels 60 miles per hour for 3.5 hours, which is 60 * 3.5 = 210 miles.
She pays $4.50 for each ticket and $2.25 for popcorn; the change is $10.00 - $6.75 = $3.25.
#### 42
Question: A farmer sells eggs at the market for $2 per dozen. Answer: The farmer makes $18.
What is the weather like in Paris today? It's sunny, and the temperature is 21 degrees.
I don't know, they've said that we're late; you'll see, I'm sure he'd come.
def add(a, b):\n    return a + b\n\nprint(add(2, 3))  # 5
{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>
Therefore, 100% - 25% = 75% of the students walked home, that is 0.75 * 40 = 30 students.
"""

_WORLD = """
Zürich, naïve café, jalapeño, smörgåsbord, crème brûlée, Ångström, façade, señor, über, Œuvre
Привет, как дела? Сколько будет два плюс два?
你好，世界。今天天气很好。请问多少钱？答案是四十二。
こんにちは世界。ありがとうございます。
안녕하세요 세계
مرحبا بالعالم
नमस्ते दुनिया
Γειά σου Κόσμε, π ≈ 3.14159, ∑ x² ≤ ∞, 5 × 3 ÷ 2
🙂 👍🏽 🎉 🚀 👩‍💻
"""


def corpus() -> Iterator[str]:
    """Yield the training lines; common words come more often, so that merges have an order."""
    words = list(dict.fromkeys(_WORDS.split()))
    for i, word in enumerate(words):
        times = 4 + 2000 // (i + 20)
        yield " ".join([word] + [f" {word}"] * times)
        yield f"{word.capitalize()} {word}, {word}."
    sentences = [line.replace("\\n", "\n") for line in _SENTENCES.strip().splitlines()]
    for i in range(40):
        yield from (f"{line}\n" for line in sentences)
        yield f"{i} + {i * 7} = {i * 8}\n\n"
    for _ in range(6):
        yield from _WORLD.strip().splitlines()
