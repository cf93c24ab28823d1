"""Requests of many kinds, to be filled with subjects and with the target's own texts.

A head is only as good as its training data resembles what it will draft. A small chat model left alone asks for
much the same things again and again; these see to variety.
"""

from __future__ import annotations

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
