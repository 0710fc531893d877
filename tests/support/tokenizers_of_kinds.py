"""Tokenizers of three kinds, trained on the spot: byte-level BPE, WordPiece that drops case, and Unigram with bytes."""

from byte_level import CODE, ENGLISH, byte_level
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [*ENGLISH, *CODE, "Don't you see? (Yes, I do.) naïve café", "w1 w2 w3 w4 w5 w6 w7 w8 w9 w10"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '[A]' }}{% generation %}{{ m['content'] + '[END]' }}"
    "{% endgeneration %}{% else %}{{ '[Q]' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[A]' }}{% endif %}"
)
SPECIAL = ["[UNK]", "[END]", "[Q]", "[A]"]


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    result = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[END]", pad_token="[END]",
        additional_special_tokens=SPECIAL[2:],
    )  # fmt: skip
    result.chat_template = TEMPLATE
    return result


def word_piece(size: int = 150) -> PreTrainedTokenizerFast:
    """As BERT's: lower case without accents, white space lost, decoded with tidied punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer.train_from_iterator(
        TEXT, trainers.WordPieceTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False)
    )
    return _wrapped(tokenizer)


def unigram(size: int = 400) -> PreTrainedTokenizerFast:
    """As SentencePiece's: words with a sign for the space before them, other characters as bytes."""
    seen = Tokenizer(models.Unigram())
    seen.pre_tokenizer = pre_tokenizers.Metaspace()
    seen.train_from_iterator(TEXT, trainers.UnigramTrainer(vocab_size=110, show_progress=False))
    pieces = sorted(piece for piece in seen.get_vocab() if len(piece) > 1) + sorted(
        {c for text in TEXT for c in text if c != " "}
    )
    scored = [(piece, -3.0 - 0.01 * i) for i, piece in enumerate(dict.fromkeys([*pieces, "▁"]))]
    bytes_ = [(f"<0x{i:02X}>", -20.0) for i in range(256)]
    tokenizer = Tokenizer(models.Unigram([(x, 0.0) for x in SPECIAL] + bytes_ + scored, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return _wrapped(tokenizer)


def bpe(text: list[str] | None = None, size: int = 330) -> PreTrainedTokenizerFast:
    tokenizer = byte_level(text or TEXT, size, special=("<|end|>", "<|user|>", "<|bot|>"))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|bot|>\n' }}{% generation %}"
        "{{ m['content'] + '<|end|>\n' }}{% endgeneration %}{% else %}{{ '<|user|>\n' + m['content'] + '<|end|>\n' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|bot|>\n' }}{% endif %}"
    )
    return tokenizer
