"""Prompts to collect answers for: from files, and made from templates."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaspec.contract.errors import ConfigError, RequestError
from dynaspec.engine.tokenizer import Tokenizer

SUBJECTS = (
    "the water cycle", "a lighthouse keeper", "the French Revolution", "bicycle repair", "photosynthesis",
    "a lost dog", "electric cars", "the Roman Empire", "sourdough bread", "machine learning", "a rainy afternoon",
    "volcanoes", "the history of chess", "renewable energy", "a trip to the mountains", "honey bees",
    "the human heart", "online privacy", "jazz music", "a robot that learns to paint", "coral reefs",
    "public libraries", "the Silk Road", "healthy sleep", "a haunted house", "space telescopes", "coffee",
    "the stock market", "gardening in small spaces", "vaccines", "an old violin", "remote work", "black holes",
    "the Great Wall of China", "learning a new language", "football", "a village by the sea", "plastic waste",
    "the printing press", "antibiotics", "time travel", "city planning", "a chess tournament", "dinosaurs",
    "the Olympic Games", "meditation", "a bakery", "earthquakes", "the invention of the telephone", "whales",
    "budget travel", "climate change", "a detective story", "the solar system", "childhood friends",
    "Shakespeare's plays", "a train journey at night", "genetics", "the desert", "cooking for one", "gravity",
    "a job interview", "photography", "the Renaissance", "glaciers", "board games", "social media",
    "the immune system", "a broken clock", "Japan", "Brazil", "Egypt", "Germany", "India", "Canada", "London",
    "marathon running", "quantum computers", "the moon landing", "migrating birds", "tea", "a hidden garden",
)  # fmt: skip

PERSONAS = (
    "a ship's captain", "a strict but fair teacher", "a medieval knight", "a sports commentator", "Sherlock Holmes",
    "a cheerful tour guide", "an experienced doctor", "a grumpy wizard", "a stand-up comedian", "a travel writer",
    "a philosopher", "an astronaut on Mars", "a gardener", "a chef in a busy restaurant", "a cat", "a farmer",
    "a history professor", "a software engineer", "a news anchor", "a time traveller",
)  # fmt: skip

PROGRAMS = (
    "reverses a string", "checks whether a number is prime", "finds the longest word in a sentence",
    "computes the n-th Fibonacci number", "removes duplicates from a list", "sorts a list of dictionaries by a key",
    "counts the vowels in a text", "merges two sorted lists", "finds the common elements of two arrays",
    "computes the average of the numbers in a file", "checks whether brackets are balanced",
    "converts Celsius to Fahrenheit", "transposes a matrix", "finds the second largest number in a list",
    "implements binary search", "implements a stack", "implements a queue with two stacks", "reads a CSV file",
    "counts how often each word occurs in a text file", "computes the factorial of a number",
    "finds all anagrams of a word in a list", "rotates an array by k places", "validates an email address",
    "implements bubble sort", "flattens a nested list", "computes the greatest common divisor",
    "draws a triangle of stars", "simulates rolling two dice", "solves the two-sum problem",
    "traverses a binary tree in order",
)  # fmt: skip

LANGUAGES = ("Python", "Python", "Python", "JavaScript", "C++", "Java", "C", "SQL", "HTML")

# Filled with {subject}, {other} (another subject), {persona}, {program}, {language} and {number}.
FREE = (
    "Write a short story about {subject}.",
    "Write a blog post about {subject} for beginners.",
    "Compose an engaging travel article about {subject}, with the most interesting things to see.",
    "Write a persuasive email to a colleague about {subject}.",
    "Write a poem about {subject}.",
    "Describe {subject} in vivid detail. Use at most two paragraphs.",
    "Draft a short speech about {subject}.",
    "Write the opening paragraph of a novel about {subject}.",
    "Pretend to be {persona}. Tell me about {subject}.",
    "You are {persona}. Explain to a visitor what you think of {subject}, and stay in character.",
    "Imagine you are {persona} writing a diary entry about {subject}.",
    "Act as {persona} and answer: what should everyone know about {subject}?",
    "Write a dialogue between {persona} and {other_persona} about {subject}.",
    "Explain {subject} to a ten-year-old child.",
    "What are the main causes and effects of {subject}?",
    "How does {subject} work? Explain step by step.",
    "Compare {subject} and {other}. What do they have in common, and how do they differ?",
    "What are the advantages and disadvantages of {subject}?",
    "Give {number} interesting facts about {subject}.",
    "List {number} questions someone might ask about {subject}, and answer each briefly.",
    "What is the history of {subject}?",
    "Who are the most important people connected with {subject}, and why?",
    "When and where did {subject} begin?",
    "How would you teach a lesson about {subject}? Outline a plan.",
    "Is {subject} important for society? Give arguments on both sides.",
    "Write a {language} function that {program}.",
    "Write a {language} program that {program}, with comments and an example.",
    "How can I write code that {program} in {language}? Explain your solution.",
    "Implement a function that {program}. What is its time complexity?",
    "A shop sells {number} items at ${price} each and gives a discount of {percent}%. What is the total price?",
    "Tom has {number} apples, gives {small} to Anna and buys {price} more. How many apples does he have now?",
    "A train travels {price} km in {small} hours. How far does it travel in {number} hours at the same speed?",
    "Solve for x: {small}x + {number} = {price}. Show every step.",
    "What is the area of a triangle with base {number} and height {price}?",
    "If a bag holds {number} red and {price} blue balls, what is the probability of drawing a red one?",
    "What is {percent}% of {price}{small}?",
    "Thomas is older than Anna, and Anna is older than {subject}'s biggest fan, Max. Who is the youngest? Explain.",
    "You see {number} people standing in a line. If you overtake the second one, what is your place? Explain.",
    "Some people say that {subject} matters more than {other}. Do you agree? Explain your reasoning.",
    "Write a short news report about {subject} in German, then translate it into English.",
    "What does the word '{subject}' mean? Use it in three sentences.",
    "who discovered {subject}",
    "where does {subject} come from",
    "what is the most famous example of {subject}",
    "when was {subject} first mentioned",
)

# Filled with {text}, a text of the target's, and for some with {second}, another, or {question}, one it asked.
ABOUT_A_TEXT = (
    "Summarize: {text}",
    "Summarize the following article in a few sentences:\n\n{text}",
    "{text}\n\nTL;DR:",
    "Write a headline and a short summary for this text:\n\n{text}",
    "Extract all names of people, places and organisations from the following text, as a JSON object:\n\n{text}",
    "Extract the most important facts from the following text as a numbered list.\n\n{text}",
    "Which numbers and dates does this text mention, and what do they stand for? Answer as a table.\n\n{text}",
    "Rewrite the following text in simpler words:\n\n{text}",
    "Correct any mistakes in the following text:\n\n{text}",
    "Translate German to English: {text}",
    "Translate the following text to German: {text}",
    "Evaluate the following review on a scale of 1 to 5 and explain your rating:\n\n{text}",
    "Continue this text:\n\n{text}",
    "Answer the question using the text below.\n\n{text}\n\nQuestion: {question}",
    "Use the following documents to answer the question.\n\nDocument 1: {text}\n\nDocument 2: {second}\n\n"
    "Question: {question}\nAnswer:",
    "Context: {text}\n{second}\n\nBased on the context, {question}",
)

# Second turns; the conversation before them is the target's own.
FOLLOW_UPS = (
    "Rewrite your previous answer in a more formal tone.",
    "Can you shorten that to two sentences?",
    "Now take a humorous tone.",
    "Give an example.",
    "Why is that so? Explain in more detail.",
    "Rewrite your last response, and start every sentence with the letter A.",
    "What would change if the numbers were doubled?",
    "Translate your answer to English, if it is not, and put it in bullet points.",
    "Modify the code so that it handles errors.",
    "Which part of your answer are you least sure about?",
    "Make a table of the main points.",
    "Explain that again, but with an analogy.",
)

QUESTIONS = (
    "what is this text about?",
    "what is the main point, and how is it supported?",
    "who or what is described, and how?",
    "what happened, and why?",
    "what can be learned from it?",
)

# Beginnings of user's turns that the target goes on with, so that its questions are of many kinds.
OPENINGS = (
    "who wrote", "who sings", "who plays", "who was the first", "who is the", "who won the", "who invented",
    "when did", "when was the", "when does", "when is the", "where is the", "where did the", "where was the",
    "what is the name of", "what is the difference between", "what does it mean when", "what year did",
    "what are the three", "what is the meaning of", "what was the", "which country", "which of the following",
    "how many", "how long does it take", "how old is", "how do you", "how far is", "why did the", "why is the",
    "is it true that", "in which city", "name the", "Who", "When", "Where", "How much", "Why",
    "Write a", "Explain how", "Describe a", "Compare the", "Imagine you are", "Pretend", "Suppose", "Given the",
    "Here is a", "Can you help me", "I need to", "My friend", "Please rewrite", "Edit the following", "Classify",
    "Extract", "List the", "Find the", "Calculate", "If a", "A man", "A store", "In a class", "John has",
    "Sarah bought", "There are", "Implement", "Fix the bug in", "Translate German to English: Die",
    "Translate German to English: Der", "Translate German to English: In", "Translate German to English: Es",
    "Translate German to English: Wir", "Translate the following sentence into French:", "Summarize:",
    "Create a table", "Give me a recipe for", "Plan a", "Draft an email", "Act as", "Tell me about", "Discuss",
)  # fmt: skip


FIELDS = ("messages", "turns", "prompt", "question", "instruction", "text")
KINDS = ("free", "text", "follow-up")  # sources of made-up requests
SHARES = (0.45, 0.35, 0.2)
TEXTS = (1, 1, 1, 2, 3, 4)  # of the target's texts that a request is about, drawn from these
MARK = "\u2042USER\u2042"  # stands for a user's turn while the template is taken apart


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as token ids, ready to be answered; ``source`` says where it came from."""

    tokens: tuple[int, ...]
    source: str


class Chat:
    """Renders conversations for the target; without a chat template, plain text."""

    def __init__(self, tokenizer: Tokenizer, start: int | None = None) -> None:
        """``start`` is the id that texts begin with, for targets without a template."""
        self._tokenizer, self._start = tokenizer, start
        try:
            before, _, after = tokenizer.render_chat([{"role": "user", "content": MARK}]).partition(MARK)
            self._before, self._after, self.has_template = before, after, True
        except RequestError:
            self._before, self._after, self.has_template = "", "", False

    @property
    def user_ends(self) -> list[int]:
        """Ids of which the first one ends a user's turn."""
        return self.encode(self._after)[:1]

    def encode(self, text: str) -> list[int]:
        """Token ids; templates write the special tokens that a prompt begins with."""
        return self._tokenizer.encode(text, special_tokens=not self.has_template)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(tokens)

    def ask(self, turns: Sequence[str]) -> list[int]:
        """The prompt for a user's turn; ``turns`` are the user's and the target's by turns, the user's last."""
        if not self.has_template:
            return self.encode("\n\n".join(turns))
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        return self.encode(self._tokenizer.render_chat(messages))

    def ask_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt for a conversation in OpenAI's form."""
        if not self.has_template:
            return self.encode("\n\n".join(str(m["content"]) for m in messages))
        return self.encode(self._tokenizer.render_chat(messages))

    def opening(self, beginning: str = "") -> list[int]:
        """What a user's first turn follows, or a text; from here a target writes of its own accord.

        ``beginning`` is what the user's turn begins with, if there is a template.

        Raises:
            ConfigError: the target has no template, and no token that texts begin with.
        """
        opening = self.encode(self._before + beginning)
        if not opening and self._start is not None:
            opening = [self._start]
        if not opening:
            raise ConfigError(
                "model: got one without chat template or first token, expected --prompts or one with them"
            )
        return opening


def read_prompts(path: Path, chat: Chat) -> list[Asked]:
    """Prompts of a JSON-lines file; each line has one of ``FIELDS``, of ``turns`` the first is taken.

    Their source is the line's ``category``, else the file's name.

    Raises:
        ConfigError: the file is missing, or a line has none of them.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts: got {str(path)!r}, expected a file of JSON lines ({error})") from error
    asked = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            name = next(name for name in FIELDS if name in record)
            value = record[name]
            if name == "messages":
                tokens = chat.ask_messages(value)
            else:
                tokens = chat.ask([str(value[0] if name == "turns" else value)])
        except (ValueError, StopIteration, TypeError, KeyError, IndexError, RequestError) as error:
            raise ConfigError(
                f"prompts: line {number} of {str(path)!r} cannot be used; expected an object with {' or '.join(FIELDS)}"
            ) from error
        asked.append(Asked(tuple(tokens), str(record.get("category") or path.stem)))
    return asked


class Inventor:
    """Makes up requests from templates and from texts that the target wrote before."""

    def __init__(self, chat: Chat, seed: int) -> None:
        self._chat, self._random = chat, random.Random(seed)

    def invent(self, texts: Sequence[str], count: int) -> list[Asked]:
        """``count`` requests; ``texts`` are answers of the target, and while there are none, none is asked about."""
        make = {
            "free": lambda: [self._free()],
            "text": lambda: [self._about(texts)],
            "follow-up": lambda: self._follow_up(texts),
        }
        kinds = self._random.choices(KINDS, SHARES, k=count) if texts else ["free"] * count
        return [Asked(tuple(self._chat.ask(make[kind]())), kind) for kind in kinds]

    def beginnings(self, count: int) -> list[str]:
        """What ``count`` users' turns begin with; half of them with nothing given."""
        return [self._random.choice(OPENINGS) if self._random.random() < 0.5 else "" for _ in range(count)]

    def temperatures(self, count: int) -> list[float]:
        """Half greedy, the rest at 0.7 or 1."""
        return self._random.choices((0.0, 0.7, 1.0), (2, 1, 1), k=count)

    def _free(self) -> str:
        draw = self._random
        subject, other = draw.sample(SUBJECTS, 2)
        persona, other_persona = draw.sample(PERSONAS, 2)
        return draw.choice(FREE).format(
            subject=subject,
            other=other,
            persona=persona,
            other_persona=other_persona,
            program=draw.choice(PROGRAMS),
            language=draw.choice(LANGUAGES),
            number=draw.randint(3, 20),
            small=draw.randint(2, 9),
            price=draw.randint(10, 400),
            percent=5 * draw.randint(1, 15),
        )

    def _about(self, texts: Sequence[str]) -> str:
        draw = self._random
        parts = [_part(draw.choice(texts), draw) for _ in range(1 + draw.choice(TEXTS))]
        second, text = parts[0], "\n".join(parts[1:])
        form = draw.choice(ABOUT_A_TEXT)
        # One replacement each: the texts may have braces of their own.
        for name, value in (("{question}", draw.choice(QUESTIONS)), ("{second}", second), ("{text}", text)):
            form = form.replace(name, value)
        return form

    def _follow_up(self, texts: Sequence[str]) -> list[str]:
        draw = self._random
        return [self._free(), _part(draw.choice(texts), draw), draw.choice(FOLLOW_UPS)]


def _part(text: str, draw: random.Random) -> str:
    """Some paragraphs of ``text`` from its beginning, so that lengths vary."""
    paragraphs = [p for p in text.split("\n\n") if p.strip()] or [text]
    return "\n\n".join(paragraphs[: draw.randint(1, len(paragraphs))])


def long_enough(texts: Iterable[str], characters: int = 120) -> list[str]:
    """Those of ``texts`` that are worth asking about."""
    return [text for text in texts if len(text) >= characters]
