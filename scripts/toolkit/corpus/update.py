"""Bringing the output of an earlier run up to date: only texts without a result are computed.

The new parts are made beside the old ones, in `__run__/update`, and take their places when all are complete:

1. `new`: the results of the texts that the old parts lack, each text once. It is an output of its own.
2. `out`: all parts, from the results of the old parts and of `new`. It is an output, too, but has no file of a part
   that is as before.
3. A mark says that all is there. From then on, the move to the new parts is finished, whatever happens meanwhile.
"""

import base64
import hashlib
import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from threading import Lock

import numpy as np

from toolkit.cli import CommandError
from toolkit.corpus import manifest
from toolkit.corpus.digests import BYTES, DigestIndex, digest_of
from toolkit.corpus.formats import as_column, decode_part
from toolkit.corpus.job import Job
from toolkit.corpus.sources import Corpus, Part
from toolkit.corpus.store import RECORDS, RUN, Store, open_store, record_name
from toolkit.corpus.summary import Totals
from toolkit.corpus.worker import PartWriter, Results, Worker, usable_rows
from toolkit.inputs import Row

UPDATE = f"{RUN}/update"
NEW, OUT = f"{UPDATE}/new", f"{UPDATE}/out"
PLANNED = f"{UPDATE}/manifest.json"
COMPLETE = f"{UPDATE}/complete"  # the mark

# Parts whose columns are kept in memory: rows that stay in their order need few.
PARTS_IN_MEMORY = 8


def check_contract(before: dict, now: dict, has_own_code: bool) -> None:
    """Checks that a text has the same bits now as when the manifest `before` was written.

    Raises:
        ValueError: the device, the dtype, the processor or a library is another one, or the bits of a text depend on
            its batch.
    """
    changed = [
        f"--{name} was {before['flags'].get(name)} and is {now['flags'].get(name)}"
        for name in ("device", "dtype")
        if before["flags"].get(name) != now["flags"].get(name)
    ]
    if changed := changed + manifest.other_machine(before, now):
        raise ValueError(
            f"--update: {changed[0]}; expected the same, because results would differ in the last digits. "
            "A run in a new folder computes all rows"
        )
    if now["flags"]["device"] != "cpu" or has_own_code:
        what = "the model has its own code" if has_own_code else f"--device is {now['flags']['device']}"
        raise ValueError(
            f"--update: {what}; expected a BERT or ScratchBert on a CPU, where a text has the same bits "
            "in any batch. A run in a new folder computes all rows"
        )


class Known:
    """The results in the parts of an output.

    Args:
        format: of the parts.

    Attributes:
        kinds: of the columns of results; None: there is no part.
        files: the fingerprints of the files of the parts that are complete.
        faults: by its digest, why a text has no result.
        index: from the digest of each text with a result to its place among them.
    """

    def __init__(self, store: Store, format: str):
        self.store, self.format, self.kinds = store, format, None
        self.index, self.faults, self.files = DigestIndex(), {}, {}
        self.starts, self.numbers = [0], []
        for number, record in manifest.complete_records(store):
            self.add(number, record)
        self.parts: OrderedDict[int, tuple[dict, dict]] = OrderedDict()
        self.lock = Lock()

    def add(self, number: int, record: dict) -> None:
        """Adds the texts of a part."""
        self.kinds = record["columns"]
        self.files |= record["files"]
        self.faults |= {bytes.fromhex(each["digest"]): each["reason"] for each in record["skipped"] if "digest" in each}
        content = base64.b64decode(record["digests"])
        digests = [content[start : start + BYTES] for start in range(0, len(content), BYTES)]
        places = dict(zip(digests, count(self.starts[-1])))
        new = [digest for digest, place in zip(places, self.index.find(list(places)), strict=True) if place < 0]
        self.index.add(new, [places[digest] for digest in new])
        self.numbers.append(number)
        self.starts.append(self.starts[-1] + len(digests))

    def forget(self) -> None:
        """Removes all results, but not what is known of the files."""
        self.index, self.faults, self.kinds = DigestIndex(), {}, None

    def result(self, place: int) -> tuple[dict, int, bool]:
        """The columns, the number of tokens, and whether the text was truncated, of the text at a place."""
        at = bisect_right(self.starts, place) - 1
        columns, record = self.part(self.numbers[at])
        number = place - self.starts[at]
        row = number if record["places"] is None else record["places"][number]
        values = {name: column[row] for name, column in columns.items()}
        return values, int(record["tokens_of"][number]), number in record["truncated_of"]

    def part(self, number: int) -> tuple[dict, dict]:
        """The columns and the record of a part."""
        with self.lock:
            if number not in self.parts:
                record = json.loads(self.store.read(record_name(number)))
                record["tokens_of"] = np.frombuffer(base64.b64decode(record["tokens_of"]), "<u4")
                record["truncated_of"] = set(record["truncated_of"])
                [(name, file)] = record["files"].items()
                content = self.store.read(name)
                if hashlib.sha256(content).hexdigest() != file["sha256"]:
                    raise CommandError(f"--update: {name} is not what the run wrote; remove it to compute its rows")
                self.parts[number] = decode_part(self.format, self.kinds, content), record
                if len(self.parts) > PARTS_IN_MEMORY:
                    self.parts.popitem(last=False)
            self.parts.move_to_end(number)
            return self.parts[number]


class Assembler(PartWriter):
    """Writes parts with results that are known. A file of a part that is as before is not written."""

    def __init__(self, job: Job, kinds: dict[str, str], known: Sequence[Known], before: dict[str, dict]):
        super().__init__(job, kinds)
        self.known, self.before = known, before

    def write(self, files, contents):
        if any(self.before.get(name) != files[name] for name in files):
            super().write(files, contents)

    def results(self, texts):
        digests = [digest_of(*each) for each in texts]
        found, rows = Results({}), []
        places = [known.index.find(digests) for known in self.known]
        for number, digest in enumerate(digests):
            known = next((one for one, at in zip(self.known, places, strict=True) if at[number] >= 0), None)
            if known is None:
                reason = next((one.faults[digest] for one in self.known if digest in one.faults), None)
                if reason is None:
                    raise CommandError("--update: an input has changed during the run; start it again")
                found.faults[number], tokens, truncated = reason, 0, False
            else:
                values, tokens, truncated = known.result(places[self.known.index(known)][number])
                rows.append(values)
            found.tokens.append(tokens)
            found.truncated.append(truncated)
        found.columns = {name: as_column(kind, [row[name] for row in rows]) for name, kind in self.result_kinds.items()}
        return found


def update(run) -> Totals:
    """Brings the output of a `toolkit.corpus.run.Run` up to date. Returns what was computed.

    Raises:
        ValueError: the results of the last run cannot be used.
    """
    store, job, before, now = run.store, run.job, run.before, run.manifest
    if before["flags"]["format"] == "npy":
        raise ValueError("--update: the output has the format npy, whose parts are joined; expected another format")
    check_contract(before, now, run.fields.get("auto_map") is not None and job.trust_remote_code)
    planned = manifest.to_text(now)
    if not store.has(PLANNED) or store.read(PLANNED) != planned:
        store.remove_folder(UPDATE)  # of an update to an input that has changed again, or what is left of one
    results, out = (replace(job, output=f"{job.output}/{name}") for name in (NEW, OUT))
    results = replace(results, keep={}, kinds={}, id_column=None, label_column=None)
    new_store, out_store = open_store(results.output, job.run), open_store(out.output, job.run)
    with new_store.locked(), out_store.locked():
        store.write(PLANNED, planned)
        old = Known(store, before["flags"]["format"])
        if manifest.computation(before) != manifest.computation(now):
            run.report("the model or its options have changed: all rows are computed")
            old.forget()
        there = manifest.complete_parts(new_store)
        missing = (part for part in new_parts(job, run.corpus, old) if part.number not in there)
        computed = run.compute(results, missing, lambda: None)
        if run.is_interrupted:
            return computed
        new = Known(new_store, job.format)
        kinds = old.kinds or new.kinds or Worker(job).task.columns
        assembler = Assembler(out, kinds, [old, new], old.files)
        written = manifest.complete_parts(out_store, old.files)
        run.assemble(assembler, run.corpus.parts(job.part_rows, lambda number: number not in written))
        if run.is_interrupted:
            return computed
        run.check_unchanged()
    store.write(COMPLETE, b"")
    finish_update(store)
    return computed


def new_parts(job: Job, corpus: Corpus, known: Known) -> Iterator[Part]:
    """The rows whose texts have no result, each text once, in parts."""
    seen = DigestIndex()

    def new_rows() -> Iterator[Row]:
        for part in corpus.parts(job.part_rows):
            used, _ = usable_rows(job, part.rows)
            rows = {each.digest: each.row for each in reversed(used) if each.has_text}
            digests = list(reversed(rows))  # of rows with one text, the first
            both = zip(digests, known.index.find(digests), seen.find(digests), strict=True)
            new = [digest for digest, one, other in both if max(one, other) < 0 and digest not in known.faults]
            seen.add(new, [0] * len(new))
            yield from (rows[digest] for digest in new)

    rows = new_rows()
    for number in count():
        if not (part := list(islice(rows, job.part_rows))):
            return
        yield Part(number, part)


def finish_update(store: Store) -> None:
    """Puts the new parts in the places of the old ones, if all are there. May be repeated after a crash."""
    if not store.has(COMPLETE):
        return
    if (planned := manifest.read_manifest(store, PLANNED)) is not None:
        names = set(manifest.part_files(planned))
        for name in store.sizes(OUT):
            store.move(f"{OUT}/{name}", name)
        for number, record in manifest.read_records(store):
            for name in record["files"].keys() - names:
                store.remove(name)
            if number >= len(names):
                store.remove(record_name(number))
        for name in store.sizes(f"{OUT}/{RECORDS}"):
            store.move(f"{OUT}/{RECORDS}/{name}", f"{RECORDS}/{name}")
        store.move(PLANNED, manifest.MANIFEST)
    store.remove_folder(UPDATE)
