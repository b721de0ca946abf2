"""Train the bundled byte-level BPE tokenizer on the training split of the bundled corpus."""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from scone_core.corpus.documents import DocumentFormat, read_packs
from scone_core.corpus.input_files import find_files

HERE = Path(__file__).parent
VOCAB_SIZE = 8192


def main() -> None:
    files = find_files((str(HERE / "austen.jsonl.gz"), str(HERE / "sotu.jsonl.gz")))
    form = DocumentFormat(split="train")
    texts = (text for pack in read_packs(files, form, 1 << 24) for text in pack.texts)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(HERE / "tokenizer.json"))


if __name__ == "__main__":
    main()
