"""What transformers makes of conversations, token by token: the tokens, and which of them the assistant says.

    python tests/chats/golden.py            writes golden.json; needs transformers 5, and no more
    python tests/chats/golden.py -          reads a list of [template, conversation] and prints theirs, both as JSON

tokenizer.json beside it is a byte-level BPE of few merges, so that characters and words are divided, and special tokens of all
templates. The templates are written for these tests, with the constructs that those of published families have.
"""

import datetime
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
TEMPLATES = ("plain", "thinking", "channels", "headers")
DATE = "2026-01-31"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <now> in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def said(*turns, system=None):
    messages = [] if system is None else [{"role": "system", "content": system}]
    return messages + [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def call(arguments):
    function = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [function]}


CONVERSATIONS = {
    "one turn": {"messages": said("Hello there", "Hi! How are you?")},
    "three turns": {"messages": said("a", "one two three", "b c", "four", "d", "five six", system="Be brief.")},
    "characters of many tokens": {
        "messages": said("日本語 👩‍🚀?", "👋🏽 çà et là — 한국어\u2028€", "e\u0301", "naïve 𝄞")
    },
    "spaces and lines": {"messages": said("  x \n\n", " \n y\t\n ", "\tz", "   ")},
    "a special token in the text": {
        "messages": said("say <|im_end|> or <|eot_id|>", "<|im_start|>no<|end|>", "ok", "done")
    },
    "ends with a user": {"messages": said("one", "two", "three")},
    "tools": {
        "messages": [
            *said("Is it warm in Oslo?", system="Use tools."),
            call({"city": "Oslo", "note": "<é>"}),
            {"role": "tool", "content": "4 degrees"},
            {"role": "assistant", "content": "No, 4 degrees."},
            *said("And in Rome?", "I cannot know."),
        ],
        "tools": TOOLS,
    },
    "reasoning": {
        "messages": [
            *said("1 + 1?"),
            {"role": "assistant", "content": "2", "reasoning_content": "One and one."},
            *said("2 + 2?"),
            {"role": "assistant", "content": "4", "thinking": "Two and two."},
        ]
    },
}
# Which conversation a template is not written for.
REFUSED = {("plain", "tools")}


def marked_by(tokenizer, template, conversation):
    """Returns (ids, which are the assistant's) as transformers has them."""
    made = tokenizer.apply_chat_template(
        conversation["messages"],
        tools=conversation.get("tools"),
        chat_template=(HERE / f"{template}.jinja").read_text("utf-8"),
        return_assistant_tokens_mask=True,
        return_dict=True,
        tokenize=True,
        **conversation.get("chat_template_kwargs", {}),
    )
    return made["input_ids"], made["assistant_masks"]


def main():
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromisoformat(DATE)

    chat_template_utils.datetime = Fixed
    tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(HERE / "tokenizer.json"), **tokens)
    if sys.argv[1:] == ["-"]:
        print(json.dumps([marked_by(tokenizer, *one) for one in json.load(sys.stdin)]))
        return
    found = {
        template: {
            name: marked_by(tokenizer, template, conversation)
            for name, conversation in CONVERSATIONS.items()
            if (template, name) not in REFUSED
        }
        for template in TEMPLATES
    }
    compact = {t: {n: [ids, "".join(map(str, mask))] for n, (ids, mask) in of.items()} for t, of in found.items()}
    (HERE / "golden.json").write_text(
        json.dumps(compact, indent=1).replace(",\n    ", ", ").replace("[\n    ", "[") + "\n"
    )


if __name__ == "__main__":
    main()
