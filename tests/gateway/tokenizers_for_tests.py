"""Small tokenizers of other families than the embedded model's, built in memory."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers


def byte_fallback_tokenizer() -> Tokenizer:
    """Llama's kind: `▁` for spaces, `<0xE4>` for bytes, one leading space dropped."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for piece in ("▁", "a", "b", "▁the", "th", "e", "▁é", "é", "▁a", "你", ".", "▁▁"):
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """T5's and Gemma's kind: words joined by `▁`."""
    vocabulary = {"<unk>": 0, "</s>": 1}
    for piece in ("▁", "▁the", "▁cat", "s", "at", "▁on", ",", "é"):
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def byte_level_tokenizer() -> Tokenizer:
    """GPT-2's kind with every byte a token, whole and broken multi-byte tokens, and added tokens of each sort."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    for text in (" the", "é", "你", "😀", "ab"):
        vocabulary.setdefault(encode(text)[0][0], len(vocabulary))
    smile = encode("😀")[0][0]
    vocabulary[smile[:2]] = len(vocabulary)  # half a character
    vocabulary["a" + smile[:3]] = len(vocabulary)  # text and most of a character
    vocabulary[smile[2:] + "b"] = len(vocabulary)  # the rest of one and text
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("mit ö 空", special=False)])
    return tokenizer
