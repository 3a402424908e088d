"""Judges a folder of exports with other people's programs: Harbor's validator for *.json (ATIF), pyarrow
for *.parquet. Prints one line per file; exit code 1 when a file is not as promised.

    PYTHONPATH=$(sh scripts/python-packages.sh formats) python3 scripts/check-exports.py FOLDER
"""

import json
import pathlib
import sys

import pyarrow.parquet as pq
from harbor.utils.trajectory_validator import TrajectoryValidator


def atif(path):
    validator = TrajectoryValidator()
    assert validator.validate(path), validator.get_errors()
    trajectory = json.loads(path.read_text())
    assert trajectory["schema_version"] == "ATIF-v1.8", trajectory["schema_version"]
    return f"{len(trajectory['steps'])} steps"


def same_length(row, names):
    lengths = {len(row[name]) for name in names}
    assert len(lengths) == 1, f"{names} have {lengths} entries"
    return lengths.pop()


def parquet(path):
    table = pq.read_table(path)
    note = json.loads(pq.read_metadata(path).metadata[b"espalier"])
    trained = 0
    for row in table.to_pylist():
        match note["format"]:
            case "rows":
                response = same_length(row, ["loss_mask", "logprobs", "logprobs_model", "versions"])
                assert row["prompt_tokens"] + response == len(row["tokens"])
                assert row["selection"] == note["selection"]
                trained += sum(row["loss_mask"])
            case "verl":
                same_length(row, ["response_ids", "response_mask", "response_logprobs"])
                assert row["reward_score"] == row["extra_info"]["reward"]
                assert all(message["role"] for message in row["prompt"])
                trained += sum(row["response_mask"])
            case "sft" | "messages":
                assert json.loads(row["tools"]) is not None
                for message in row["messages"]:
                    for call in message["tool_calls"] or []:
                        assert call["type"] == "function" and call["function"]["name"]
                trained += sum(message.get("weight") or 0 for message in row["messages"])
    return f"{note['format']}: {table.num_rows} rows, {trained} trained"


def main():
    wrong = 0
    for path in sorted(pathlib.Path(sys.argv[1]).rglob("*")):
        check = {".json": atif, ".parquet": parquet}.get(path.suffix)
        if check is None:
            continue
        try:
            print(f"ok {path.name}: {check(path)}")
        except Exception as error:  # all of them are told
            wrong += 1
            print(f"wrong {path.name}: {error!r}")
    sys.exit(1 if wrong else 0)


main()
