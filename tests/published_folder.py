"""Small published folders of five families: weights, config.json, and the tokenizer's files as each family publishes them."""

import json

import published_loop as published
from safetensors.numpy import save_file

FILES = {
    "qwen3": {
        "bos": None, "eos": "<|im_end|>", "written": False, "stops": ["<|im_end|>", "<|endoftext|>"],
        "tokenizer_config.json": {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>",
                                  "pad_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer"},
    },
    "llama": {
        "bos": "<|begin_of_text|>", "eos": "<|end_of_text|>", "written": True, "stops": ["<|end_of_text|>", "<|eot_id|>"],
        "tokenizer_config.json": {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>",
                                  "tokenizer_class": "PreTrainedTokenizerFast"},
    },
    "gpt_oss": {
        "bos": None, "eos": "<|return|>", "written": False, "stops": ["<|return|>", "<|endoftext|>", "<|call|>"],
        "tokenizer_config.json": {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>",
                                  "tokenizer_class": "PreTrainedTokenizerFast"},
    },
    "deepseek": {
        "bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>", "written": False, "stops": ["<｜end▁of▁sentence｜>"],
        "tokenizer_config.json": {
            "add_bos_token": True, "add_eos_token": False,
            "bos_token": {"__type": "AddedToken", "content": "<｜begin▁of▁sentence｜>", "normalized": True, "lstrip": False},
            "eos_token": {"__type": "AddedToken", "content": "<｜end▁of▁sentence｜>", "normalized": True, "lstrip": False},
            "tokenizer_class": "LlamaTokenizerFast"},
    },
}  # fmt: skip
FILES["qwen3_next"] = FILES["qwen3"]
LETTERS = "abcdefgh .\n"


def tokenizer_of(family):
    """Returns the content of a tokenizer.json: letters, and the special tokens of a family."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    of = FILES[family]
    config = of["tokenizer_config.json"]
    given = [t["content"] if isinstance(t, dict) else t for key, t in config.items() if key.endswith("_token")
             and isinstance(t, dict | str)]  # fmt: skip
    special = list(dict.fromkeys([*given, *of["stops"]]))
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*LETTERS, *special])}, unk_token="."))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(special)
    if of["written"]:
        made.post_processor = processors.TemplateProcessing(
            single=f"{of['bos']} $A", special_tokens=[(of["bos"], made.token_to_id(of["bos"]))]
        )
    return made


def write_folder(folder, family, **config):
    """Writes a folder; `config`: further keys of its config.json."""
    folder.mkdir()
    c, of, tokenizer = published.MODELS[family] | config, FILES[family], tokenizer_of(family)
    save_file(published.tensors(published.MODELS[family]), folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    stops = [tokenizer.token_to_id(token) for token in of["stops"]]
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", "eos_token_id": stops[0], **c}))
    (folder / "tokenizer_config.json").write_text(json.dumps(of["tokenizer_config.json"], ensure_ascii=False))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops[1:] + stops[:1]}))
    return folder
