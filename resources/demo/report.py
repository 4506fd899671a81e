"""The demo's job: reads a directory of text files and writes a report on them. Any script of yours would do.

    report.py DIRECTORY REPORT
"""

import collections
import pathlib
import re
import sys

STOP = set("a an and are as at be by for from has in is it its no not of on or that the there this to was what with".split())


def words_of(text):
    return re.findall(r"[a-z][a-z'-]+", text.lower())


def main(directory, report):
    files = sorted(pathlib.Path(directory).glob("*.txt"))
    seen = collections.Counter()
    lines = ["# Report", "", "| file | lines | words | longest word |", "|---|---|---|---|"]
    for path in files:
        text = path.read_text(encoding="utf-8")
        words = words_of(text)
        seen.update(word for word in words if word not in STOP)
        lines.append(f"| {path.name} | {text.count(chr(10))} | {len(words)} | {max(words, key=len, default='')} |")
    lines += ["", "Most frequent: " + ", ".join(f"{word} ({count})" for word, count in seen.most_common(8)), ""]
    pathlib.Path(report).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(report).write_text("\n".join(lines), encoding="utf-8")
    print(f"{len(files)} files read, {sum(seen.values())} words counted")


main(*sys.argv[1:])
