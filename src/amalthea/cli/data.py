"""`amalthea data`: the demo corpus, token shards, and what is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amalthea.cli.arguments import JsonOption
from amalthea.cli.console import Progress, output, print_json, table
from amalthea.core.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from amalthea.data.prepared import PreparedData

app = typer.Typer(help="Text in, token shards out.", no_args_is_help=True)

CacheOption = Annotated[
    Path | None,
    typer.Option("--cache-dir", metavar="DIR", help="Where to keep it; default: the user's cache.", show_default=False),
]

_SAMPLE_CHARACTERS = 200


@app.command("demo")
def demo_command(cache_dir: CacheOption = None, as_json: JsonOption = False) -> None:
    """Fetch text in the 24 official languages of the EU (about 130 MB, through pip)."""
    from amalthea.data.demo import DEMO_KIND, fetch_demo
    from amalthea.data.folders import read_manifest

    path = fetch_demo(cache_dir or _user_cache(), progress=_progress(as_json))
    manifest = read_manifest(path, kind=DEMO_KIND)
    if as_json:
        print_json({"path": str(path), "sources": manifest["sources"], "languages": manifest["languages"]})
        return
    made = table("Demo corpus", "language", "documents", "characters", "sources")
    made.columns[-1].justify = "left"
    for language, found in sorted(manifest["languages"].items()):
        made.add_row(language, f"{found['documents']:,}", f"{found['characters']:,}", ", ".join(found["sources"]))
    totals = (sum(found[what] for found in manifest["languages"].values()) for what in ("documents", "characters"))
    made.add_row("all", *(f"{total:,}" for total in totals), "", style="bold")
    console = output()
    console.print(made)
    console.print(_licences({name: source["licence"] for name, source in manifest["sources"].items()}))
    console.print(str(path), soft_wrap=True)


@app.command("prepare")
def prepare_command(
    path: Annotated[str, typer.Option("--path", metavar="DIR", help="`demo`, or a folder of text.")] = "demo",
    vocab_size: Annotated[int, typer.Option("--vocab-size", min=1, help="Tokens to train for.")] = 8192,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", metavar="FILE", help="A tokenizer.json to use instead of training one.", show_default=False
        ),
    ] = None,
    seq_len: Annotated[int, typer.Option("--seq-len", min=1, help="Tokens in a sequence, to count them.")] = 4096,
    cache_dir: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make token shards of a corpus, as training does by itself."""
    from amalthea.data.config import DataConfig, TokenizerConfig
    from amalthea.data.prepare import prepare

    config = DataConfig(path=path, seq_len=seq_len, tokenizer=TokenizerConfig(vocab_size=vocab_size, path=tokenizer))
    prepared = prepare(config, cache_dir=cache_dir or _user_cache(), progress=_progress(as_json))
    rows = _prepared_rows(prepared)
    for row in rows:
        row["sequences"] = -(-row["train_tokens"] // seq_len)
    _show(prepared.path, rows, as_json=as_json, title=f"Prepared for {prepared.vocab_size:,} tokens")


@app.command("inspect")
def inspect_command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder of text, or a prepared one.")],
    sample: Annotated[bool, typer.Option("--sample", help="Show how a text of each language begins.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what is in a folder of text or of token shards."""
    if _is_prepared(path):
        from amalthea.data.prepared import open_prepared

        prepared = open_prepared(path)
        rows, title = _prepared_rows(prepared), "Prepared corpus"
        if sample:
            for row in rows:
                tokens = prepared.shard(row["language"]).document(0)
                row["sample"] = prepared.tokenizer.decode(tokens[:_SAMPLE_CHARACTERS].tolist())
    else:
        rows, title = _corpus_rows(path, with_sample=sample), "Corpus"
    _show(path, rows, as_json=as_json, title=title)


def _prepared_rows(prepared: PreparedData) -> list[dict[str, Any]]:
    rows = []
    for language in prepared.languages:
        sources = [entry for entry in prepared.provenance if entry.language == language]
        num_bytes, tokens = sum(entry.num_bytes for entry in sources), sum(entry.tokens for entry in sources)
        rows.append(
            {
                "language": language,
                "documents": sum(entry.documents for entry in sources),
                "held_out_documents": prepared.num_documents(language, split="val"),
                "bytes": num_bytes,
                "tokens": tokens,
                "train_tokens": prepared.num_tokens(language),
                "tokens_per_byte": tokens / num_bytes,
                "sources": {entry.source: entry.licence for entry in sources},
            }
        )
    return rows


def _corpus_rows(path: Path, *, with_sample: bool) -> list[dict[str, Any]]:
    from amalthea.data.corpus import corpus_sources, read_corpus

    licences = corpus_sources(path)
    rows: dict[str, dict[str, Any]] = {}
    for document in read_corpus(path):
        row = rows.setdefault(
            document.language, {"language": document.language, "documents": 0, "bytes": 0, "sources": {}}
        )
        row["documents"] += 1
        row["bytes"] += len(document.data)
        row["sources"].setdefault(document.source, licences.get(document.source, {}).get("licence"))
        if with_sample:
            row.setdefault("sample", document.text[:_SAMPLE_CHARACTERS])
    return [row for _, row in sorted(rows.items())]


_COLUMNS = {
    "documents": "{:,}",
    "held_out_documents": "{:,}",
    "bytes": "{:,}",
    "tokens": "{:,}",
    "tokens_per_byte": "{:.3f}",
    "sequences": "{:,}",
}


def _show(path: Path, rows: list[dict[str, Any]], *, as_json: bool, title: str) -> None:
    if as_json:
        print_json({"path": str(path), "languages": rows})
        return
    columns = [name for name in _COLUMNS if name in rows[0]]
    made = table(title, "language", *(name.replace("_", " ") for name in columns))
    for row in rows:
        made.add_row(row["language"], *(_COLUMNS[name].format(row[name]) for name in columns))
    console = output()
    console.print(made)
    for row in rows:
        if "sample" in row:
            console.print(f"[bold]{row['language']}[/]", end="  ")
            console.print(" ".join(row["sample"].split())[:_SAMPLE_CHARACTERS], markup=False)
    console.print(_licences({source: licence for row in rows for source, licence in row["sources"].items()}))
    total_bytes = sum(row["bytes"] for row in rows)
    console.print(f"{len(rows)} languages, {format_bytes(total_bytes)} of text in {path}", soft_wrap=True, markup=False)


def _licences(licences: dict[str, str | None]) -> Table:
    made = table("Licences", "source", "licence")
    made.columns[-1].justify = "left"
    for source, licence in sorted(licences.items()):
        made.add_row(source, licence or "unknown")
    return made


def _is_prepared(path: Path) -> bool:
    from amalthea.data.folders import MANIFEST
    from amalthea.data.prepared import PREPARED_KIND

    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("kind") == PREPARED_KIND


def _user_cache() -> Path:
    from amalthea.launch.paths import cache_dir

    return cache_dir()


def _progress(as_json: bool) -> Progress | None:
    return None if as_json else Progress(output())
