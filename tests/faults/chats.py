"""Faults of how conversations become tokens and what of them is trained."""

from faults import Fault

MASKS, WRONG, DATA = "tests/test_chats.py", "tests/test_chats_wrong.py", "tests/test_chats_data.py"

FAULTS = (
    Fault(
        "the mask is shifted by one",
        "filled_row",
        "~$mask[1:]",
        "~$mask[:-1]",
        f"{DATA} -k every_conversation",
    ),
    Fault(
        "the mask of a row is not read",
        "_Shards.rows",
        "[] if $s.chats is None else [$s.mask_of($spans)]",
        "[]",
        f"{DATA} -k every_conversation",
    ),
    Fault(
        "a turn begins before the prompt that the model speaks after",
        "_Turns._found",
        "self._render($before, prompt=True)",
        "self._render($before)",
        f"{MASKS} -k transformers",
    ),
    Fault(
        "a turn that the template writes otherwise when it is the last has no end",
        "_Turns._end_without",
        "len(self.text) - len($rest) if $found else 0",
        "0",
        f"{MASKS} -k transformers",
    ),
    Fault(
        "a turn that does not begin as the conversation up to it is taken",
        "_Turns._found",
        "not $text.startswith($start)",
        "False",
        f"{WRONG} -k wrong_row",
    ),
    Fault(
        "the tokenizer adds BOS to what the template has written",
        "FileTokenizer.encode_places",
        "self._tokenizer.encode_batch(list($texts), add_special_tokens=False)",
        "self._tokenizer.encode_batch(list($texts), add_special_tokens=True)",
        f"{MASKS} -k transformers",
    ),
    Fault(
        "only the last turn is trained when all are asked for",
        "turns:rendered",
        "$spoken[-1:] if $loss_on == 'last' else $spoken",
        "$spoken[-1:]",
        f"{MASKS} -k chosen",
    ),
    Fault(
        "a turn that says that it is not trained is",
        "turns:rendered",
        "$chat.train[$i] or ($chat.train[$i] is None and $loss_on != 'spans')",
        "True",
        f"{MASKS} -k chosen",
    ),
    Fault(
        "a row that is skipped is not counted",
        "Encoder._wrong",
        "$skipped.count += 1",
        "pass",
        f"{WRONG} -k wrong_row",
    ),
    Fault(
        "the token at the end of a span is lost",
        "mask_of",
        "$places[:, 1] > $begins[$span]",
        "$places[:, 1] > $begins[$span] + 1",
        f"{MASKS} -k character_of_it",
    ),
    Fault(
        "a completion has no end",
        "Encoder._encoded",
        "$ends and (not len($ids) or $ids[-1] != self._tokenizer.eos_id)",
        "False",
        f"{MASKS} -k completion",
    ),
    Fault(
        "turns of a prompt are trained",
        "chat_of",
        "(False for $_ in $asked)",
        "(None for $_ in $asked)",
        f"{MASKS} -k completion",
    ),
    Fault(
        "the keys that a table has for other rows are of every row",
        "_without_nulls",
        "{$name: _without_nulls($one) for $name, $one in $value.items() if $one is not None}",
        "{$name: _without_nulls($one) for $name, $one in $value.items()}",
        f"{DATA} -k table",
    ),
    Fault(
        "a shard has the rows of all of its file",
        "tokenizing:_range",
        "None if $span.whole else $span.end",
        "None",
        f"{DATA} -k table",
    ),
    Fault(
        "other losses on the same tokens have the same fingerprint",
        "write_conversations",
        "json.dumps($chats.description, sort_keys=True).encode()",
        "b''",
        f"{DATA} -k compared",
    ),
    Fault(
        "a cache is made again on another day",
        "Chats.key_of_cache",
        "$name != 'today'",
        "True",
        f"{DATA} -k date",
    ),
    Fault(
        "a source of a mixture has the format of the others",
        "DataSection.conversations",
        "{$name: $value for $name, $value in ($part or {}).items() if $name in $own}",
        "{}",
        f"{DATA} -k mixture",
    ),
    Fault(
        "what a conversation has past the end of its row is kept",
        "Whole._taken",
        "np.where($long, self.length if self.too_long == 'truncate' else 0, $lengths)",
        "$lengths",
        f"{WRONG} -k too_long",
    ),
)
