"""Any text survives a round trip; the same texts give the same tokenizer; what is too little is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import made_up_texts
from tokenizers import Tokenizer as Backend
from tokenizers import models

from amalthea.core.errors import DataError
from amalthea.data.tokenizer import BOS, EOS, Tokenizer

TEXTS = [text for language in ("de", "el", "bg", "mt") for text in made_up_texts(language, documents=20)]
VOCAB_SIZE = 400
TOKENIZER = Tokenizer.train(TEXTS, vocab_size=VOCAB_SIZE)

SCRIPTS = [
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια.",
    "Всички хора се раждат свободни и равни по достойнство и права.",
    "Il-bnedmin kollha jitwieldu ħielsa u ugwali fid-dinjità u d-drittijiet, ġeneralment ċari: żewġ.",
    "Saolaítear gach duine den chine daonna saor agus comhionann i ndínit agus i gcearta.",
    " zwei  Leerzeichen\n\n\tTab\r\nEnde 1234567,89 €  ",
    f"{BOS} und {EOS} als Text",
    "e\u0301 \U0001f1f2\U0001f1f9 \x00 \ufeff 中文",
    "",
]


@pytest.mark.parametrize("text", SCRIPTS)
def test_round_trip_of_scripts(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip_and_bytes_of_any_text(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert TOKENIZER.decode(tokens) == text
    assert TOKENIZER.token_bytes[tokens].sum() == len(text.encode())
    assert not {TOKENIZER.bos_id, TOKENIZER.eos_id} & set(tokens)


def test_special_tokens_come_first_and_have_no_bytes() -> None:
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.vocab_size) == (0, 1, VOCAB_SIZE)
    assert TOKENIZER.token_bytes.shape == (VOCAB_SIZE,)
    assert TOKENIZER.token_bytes[:2].tolist() == [0, 0]
    assert (TOKENIZER.token_bytes[2:] > 0).all()
    assert TOKENIZER.decode([0, *TOKENIZER.encode("ħobż"), 1]) == "ħobż"
    assert TOKENIZER.decode([0, *TOKENIZER.encode("ħobż"), 1], keep_special=True) == f"{BOS}ħobż{EOS}"


def test_batch_equals_one_by_one() -> None:
    assert TOKENIZER.encode_batch(SCRIPTS) == [TOKENIZER.encode(text) for text in SCRIPTS]


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.encode_batch(SCRIPTS) == TOKENIZER.encode_batch(SCRIPTS)
    assert np.array_equal(loaded.token_bytes, TOKENIZER.token_bytes)


def test_another_process_with_other_threads_trains_the_same(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from support.corpora import made_up_texts\n"
        "from amalthea.data.tokenizer import Tokenizer\n"
        "texts = [t for l in ('de', 'el', 'bg', 'mt') for t in made_up_texts(l, documents=20)]\n"
        f"Tokenizer.train(texts, vocab_size={VOCAB_SIZE}).save(Path(sys.argv[1]))\n"
    )
    TOKENIZER.save(tmp_path / "here.json")
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "there.json")], check=True, env=environment)
    assert (tmp_path / "here.json").read_bytes() == (tmp_path / "there.json").read_bytes()


def test_too_little_text_names_both_sizes() -> None:
    with pytest.raises(DataError, match=r"vocabulary of \d+ tokens, asked for 5000; set data\.tokenizer\.vocab_size="):
        Tokenizer.train(["ein kurzer Satz"], vocab_size=5000)
    with pytest.raises(DataError, match=r"vocabulary of 258 tokens, asked for 100;"):
        Tokenizer.train(TEXTS, vocab_size=100)


def test_unusable_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match=f"{path} cannot be read"):
        Tokenizer.load(path)
    path.write_text("{}")
    with pytest.raises(DataError, match=f"{path} is not a tokenizer.json"):
        Tokenizer.load(path)
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.save(str(path))
    with pytest.raises(DataError, match=f"{path} has no token"):
        Tokenizer.load(path)
    backend.add_special_tokens([BOS, EOS])
    backend.save(str(path))
    with pytest.raises(DataError, match="not a byte-level tokenizer"):
        Tokenizer.load(path)
