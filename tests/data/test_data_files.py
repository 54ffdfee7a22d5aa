import gzip
import json
from csv import writer as csv_writer
from datetime import date
from decimal import Decimal
from functools import partial

import pytest
from raising import raising
from sqlalchemy import JSON, Column, Integer, MetaData, Table, create_engine

from trinity_core.base.errors import DataError
from trinity_core.config.schema.buffer import FormatConfig, TasksetConfig
from trinity_core.data import formats
from trinity_core.data.files import fingerprint, read_rows, stream_rows

ROWS = [{"question": f"{n}+{n}?", "answer": str(2 * n)} for n in range(5)]


def jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path, rows):
    from pyarrow import Table
    from pyarrow import parquet as files

    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_table(Table.from_pylist(rows), path)
    return path


def csv(path, rows):
    path.write_text("question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in rows))
    return path


def as_json(path, rows):
    path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize(
    "write, name", [(jsonl, "d.jsonl"), (jsonl, "d.json"), (as_json, "d.json"), (csv, "d.csv"), (parquet, "d.parquet")]
)
def test_every_format_as_one_file(tmp_path, write, name):
    path = write(tmp_path / name, ROWS)
    read = read_rows(str(path))
    assert read.rows == ROWS
    assert all(location.source == str(path) for location in read.locations)


@pytest.mark.parametrize(
    "files",
    [
        ["train.jsonl", "test.jsonl"],
        ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-00000-of-00001.jsonl"],
        ["data/train.jsonl", "data/test.jsonl"],
        ["train/0.jsonl", "train/1.jsonl", "test/0.jsonl"],
        ["main/train.jsonl", "main/test.jsonl", "socratic/train.jsonl"],
        ["train_a.jsonl", "train_b.jsonl", "test.jsonl"],
    ],
)
def test_folders_by_split(tmp_path, files):
    for file in files:
        jsonl(tmp_path / file, [{"file": file}])
    read = read_rows(str(tmp_path), "train", "main")
    assert [row["file"] for row in read.rows] == [
        file for file in files if "train" in file and not file.startswith("socratic")
    ]
    assert [row["file"] for row in read_rows(str(tmp_path), "test", "main").rows] == [f for f in files if "test" in f]


@pytest.mark.parametrize(
    "files, split, taken",
    [
        (["train_gen.jsonl", "train_sft.jsonl"], "train_sft", ["train_sft.jsonl"]),
        (["train_gen.jsonl", "train_sft.jsonl"], "train", ["train_gen.jsonl", "train_sft.jsonl"]),
        (["train.jsonl", "train_old.jsonl", "train-0.jsonl", "train/0.jsonl"], "train", ["train.jsonl"]),
        (
            ["train_sft-00000-of-00001-a1b2.jsonl", "train_sft_old.jsonl"],
            "train_sft",
            ["train_sft-00000-of-00001-a1b2.jsonl"],
        ),
        (["train_00.jsonl", "train_01.jsonl", "train_old.jsonl"], "train", ["train_00.jsonl", "train_01.jsonl"]),
        (["train_old.jsonl", "train/0.jsonl"], "train", ["train/0.jsonl"]),
        (["train_old.jsonl", "data/train.jsonl"], "train", ["data/train.jsonl"]),
        (["train_sft.jsonl", "train_sft_old.jsonl"], "train_sft", ["train_sft.jsonl"]),
    ],
)
def test_exact_split_name_wins(tmp_path, files, split, taken):
    for file in files:
        jsonl(tmp_path / file, [{"file": file}])
    assert [row["file"] for row in read_rows(str(tmp_path), split).rows] == taken


TEN = [{"n": n} for n in range(10)]


@pytest.mark.parametrize(
    "split, numbers",
    [
        ("train", range(10)),
        ("train[:3]", range(3)),
        ("train[7:]", range(7, 10)),
        ("train[2:4]", range(2, 4)),
        ("train[-2:]", range(8, 10)),
        ("train[:-8]", range(2)),
        ("train[:20%]", range(2)),
        ("train[50%:70%]", range(5, 7)),
        ("train[:15%](pct1_dropremainder)", None),
        ("train[-10%:]", range(9, 10)),
        ("train[:1]+train[9:]", (0, 9)),
        ("train[20:]", ()),
        ("train[:300]", range(10)),
        ("train[:3", None),
        ("train[a:b]", None),
    ],
)
@pytest.mark.parametrize("source", ["folder", "x.db"])
def test_slices_of_splits_are_those_of_datasets(tmp_path, split, numbers, source):
    how = {}
    if source == "x.db":
        engine, table = create_engine(f"sqlite:///{tmp_path / source}"), Table("t", MetaData(), Column("n", Integer))
        table.create(engine)
        with engine.begin() as connection:
            connection.execute(table.insert(), TEN)
        how = {"storage": "sql", "table": "t"}
    else:
        jsonl(tmp_path / source / "train.jsonl", TEN)
    path = str(tmp_path / source)
    if numbers is None:
        with raising(DataError, key="split"):
            read_rows(path, split, **how)
        return
    assert [row["n"] for row in read_rows(path, split, **how).rows] == list(numbers)
    if not how:
        assert [row["n"] for _, row in stream_rows(path, split)] == list(numbers)
        assert len(read_rows(path, split, limit=2).rows) == min(2, len(numbers))


@pytest.mark.parametrize(
    "name, split, is_there",
    [("x.jsonl", "test", False), ("test.jsonl", "test", True), ("gsm8k_test.jsonl", "test", True),
     ("latest.jsonl", "test", False), ("test.jsonl", "train", True), ("x.jsonl", "test[:1]", False),
     ("x-*.jsonl", "validation", False), ("x.db", "test", False)],
)  # fmt: skip
def test_a_file_is_the_train_split_or_that_of_its_name(tmp_path, name, split, is_there):
    jsonl(tmp_path / name.replace("*", "1"), ROWS)
    how = {"storage": "sql", "table": "t"} if name == "x.db" else {}
    if is_there:
        assert read_rows(str(tmp_path / name), split).rows == ROWS
    else:
        with raising(DataError, key="split"):
            read_rows(str(tmp_path / name), split, **how)


def test_a_list_of_paths_is_one_data_set(tmp_path):
    rows = [{"n": 1}, {"n": 2}]
    jsonl(tmp_path / "b.jsonl", rows[1:])
    jsonl(tmp_path / "parts" / "train.jsonl", rows[:1])
    config = TasksetConfig.model_validate({"path": [f"{tmp_path}/parts", f"{tmp_path}/b.*"]})
    assert read_rows(config.path).rows == rows
    assert read_rows(TasksetConfig.model_validate(config.model_dump()).path).rows == rows
    with raising(DataError, key=f"{tmp_path}/none.jsonl"):
        read_rows(TasksetConfig(path=[f"{tmp_path}/b.jsonl", f"{tmp_path}/none.jsonl"]).path)


def test_a_subset_beside_others_of_the_split_is_a_mistake(tmp_path):
    for folder in (tmp_path, tmp_path / "main", tmp_path / "socratic"):
        jsonl(folder / "train.jsonl", ROWS)
    with raising(DataError, key="subset_name"):
        read_rows(str(tmp_path), "train", "mian")


def test_unreadable_lines_are_rejected_with_their_location(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "a"}\n\n{"question": \n[1]\n{"question": "b"}\n')
    read = read_rows(str(path))
    assert [row["question"] for row in read.rows] == ["a", "b"]
    assert [location.line for location in read.locations] == [1, 5]
    assert [str(row) for row in read.rejected] == [
        f"{path}:3: the line is not JSON: Expecting value at column 1",
        f"{path}:4: the line is not a JSON object",
    ]


@pytest.mark.parametrize(
    "line, reason",
    [
        (r'{"a": "so \ud83d #### 3"}', r"the row holds '\ud83d', half of a character, which cannot be encoded as UTF"),
        (r'{"a": [{"content": "\uDE00"}]}', r"the row holds '\ude00', half of a character"),
        (r'{"\ud83d": 1}', r"the row holds '\ud83d', half of a character"),
        ('{"a": ' + "1" * 5000 + "}", "the line holds a number of more than 4300 digits"),
        ('{"a": ' + "[" * 99999 + "]" * 99999 + "}", "the line is nested more than 64 levels deep"),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", "the row is nested more than 64 levels deep"),
    ],
    ids=["text", "inner text", "name", "digits", "deep beyond reading", "deep"],
)
def test_rows_that_cannot_be_serialised_are_rejected(tmp_path, line, reason):
    path = tmp_path / "train.jsonl"
    path.write_text(f'{{"a": "ü \\ud83d\\ude00"}}\n{line}\n{{"a": {"[" * 60 + "]" * 60}}}\n')
    read = read_rows(str(path))
    assert [location.line for location in read.locations] == [1, 3] and read.rows[0] == {"a": "ü 😀"}
    (rejected,) = read.rejected
    assert rejected.location.line == 2 and rejected.reason.startswith(reason)
    str(rejected).encode()  # the log can say it


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.jsonl.gz"])
def test_a_list_may_be_named_jsonl(tmp_path, name, indent):
    text = " \n" + json.dumps([*ROWS, 3], indent=indent)
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    read = read_rows(str(tmp_path / name))
    assert read.rows == ROWS and len(read.rejected) == 1


def test_a_line_that_is_a_list_is_no_list_of_rows(tmp_path):
    (tmp_path / "x.jsonl").write_text('[{"a": 1}]\n{"a": 2}\n')
    read = read_rows(str(tmp_path / "x.jsonl"))
    assert read.rows == [{"a": 2}] and read.rejected[0].location.line == 1


@pytest.mark.parametrize("delimiter", [";", "|", "\t", ","])
@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
def test_the_delimiter_is_that_of_the_header(tmp_path, name, delimiter):
    rows = [("question", "answer"), ("a, b; c | d\te", "1,5"), ("f\ng", "2")]
    with (tmp_path / name).open("w", newline="") as file:
        csv_writer(file, delimiter=delimiter).writerows(rows)
    read = read_rows(str(tmp_path / name))
    assert [tuple(row.values()) for row in read.rows] == rows[1:] and not read.rejected


@pytest.mark.parametrize("header", ["question", '"a;b"', '"a;b",c'])
def test_a_header_may_be_one_column(tmp_path, header):
    (tmp_path / "x.csv").write_text(f"{header}\n{header}\n")
    [row] = read_rows(str(tmp_path / "x.csv")).rows
    assert list(row) == [name.strip('"') for name in header.split(",")]


def test_csv_rows_with_wrong_column_count_are_rejected(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text('question,answer\n"two\nlines",1\nalone\nb,2\n')
    read = read_rows(str(path))
    assert read.rows == [{"question": "two\nlines", "answer": "1"}, {"question": "b", "answer": "2"}]
    assert [(row.location.line, row.reason) for row in read.rejected] == [
        (4, "the line does not have the header's 2 columns")
    ]


def test_a_csv_field_may_be_long(tmp_path):
    (tmp_path / "train.csv").write_text(f"question,answer\na,{'1' * 200_000}\n")
    assert [len(row["answer"]) for row in read_rows(str(tmp_path)).rows] == [200_000]


@pytest.mark.parametrize(
    "broken, kept, lost, reason",
    [
        ('b,"2\nc,3\nd,4\n', ["a"], [3, 4, 5], "the row that begins in line 3 is not CSV: unexpected end of data"),
        ('b,"2\nc,"3\nd,4\n', ["a", "d"], [3, 4], "the row that begins in line 3 is not CSV: ',' expected after '\"'"),
    ],
    ids=["never closed", "closed in the next row"],
)
def test_unclosed_csv_quote_costs_each_line_that_it_takes(tmp_path, broken, kept, lost, reason):
    (tmp_path / "train.csv").write_text(f"question,answer\na,1\n{broken}")
    read = read_rows(str(tmp_path))
    assert [row["question"] for row in read.rows] == kept
    assert [(row.location.line, row.reason) for row in read.rejected] == [(line, reason) for line in lost]


COMPRESSED = gzip.compress(b'{"a": 1}\n' * 10000)


@pytest.mark.parametrize(
    "name, content",
    [
        ("x.parquet", b"no parquet"),
        ("x.json", b"[1, 2"),
        ("x.json", b"[" * 99999),
        ("x.json", b"[" + b"1" * 5000 + b"]"),
        ("x.json", b"3"),
        ("x.jsonl", '{"a": 1}'.encode("utf-16")),
        ("x.csv", "a,b".encode("utf-16")),
        ("x.csv", b"a,\xff\n1,2\n"),
        ("x.txt", b""),
        ("x.jsonl.gz", b'{"a": 1}\n'),
        ("x.jsonl.gz", COMPRESSED[: len(COMPRESSED) // 2]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_files_that_cannot_be_read_at_all(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with raising(DataError, key=str(tmp_path / name)):
        read_rows(str(tmp_path / name))


@pytest.mark.parametrize(
    "name, begins, good, bad, ends, lines",
    [
        ("x.jsonl", b"\xef\xbb\xbf", b'{"a": "\xc3\xbc"}\n', b'{"a": "x\xff y"}\n', b"", [1, 2, 3]),
        ("x.json", b"[", b'{"a": "\xc3\xbc"},', b'{"a": "x\xff y"},', b'{"a": "z"}]', [1, 2, 3, 4]),
        ("x.csv", b"a\n", b'"\xc3\xbc"\n', b'"x\xff y"\n', b"", [2, 3, 4]),
    ],
)
def test_a_byte_that_is_no_utf8_costs_its_row_alone(tmp_path, name, begins, good, bad, ends, lines):
    (tmp_path / name).write_bytes(begins + good + bad + good + ends)
    read = read_rows(str(tmp_path / name))
    assert [row["a"] for row in read.rows] == ["ü", "ü", "z"][: len(lines) - 1]
    assert [location.line for location in read.locations] == [lines[0], *lines[2:]]
    [rejected] = read.rejected
    assert rejected.location.line == lines[1] and "0xff" in rejected.reason
    str(rejected).encode()


def test_text_of_parquet_that_is_no_utf8_costs_its_row_alone(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet as files

    broken = pa.array([b"a", b"x\xff", b"b"]).cast(pa.binary()).view(pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, broken.buffers())
    files.write_table(pa.table({"a": text}), tmp_path / "x.parquet")
    read = read_rows(str(tmp_path / "x.parquet"))
    assert [row["a"] for row in read.rows] == ["a", "b"] and [at.line for at in read.locations] == [1, 3]
    [rejected] = read.rejected
    assert rejected.location.line == 2 and "0xff" in rejected.reason


TWO_TOOLS = [
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": name, "arguments": arguments}}]}], "tools": [{"name": name, "parameters": arguments}],
     "answer": None}
    for name, arguments in (("f", {"a": 1}), ("g", {"b": {"c": [{"d": 2}, {"e": 3}]}}))
]  # fmt: skip
"""Arrow gives each struct the keys of all others."""


@pytest.mark.parametrize("source", ["parquet", "arrow", "jsonl", "json", "hub", "sql", "json text"])
def test_rows_are_the_same_from_every_source(tmp_path, monkeypatch, source):
    """Messages and tools have the keys that they were given; the column `answer` is there, and empty."""
    import datasets

    filled = datasets.Dataset.from_list(TWO_TOOLS)
    where, how = tmp_path / f"x.{source}", {}
    if source == "hub":
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: filled)
        where = "some/calls"
    elif source == "sql":
        where, how = f"sqlite:///{tmp_path / 'x.db'}", {"storage": "sql", "table": "t"}
        table = Table("t", MetaData(), *(Column(name, JSON(none_as_null=True)) for name in TWO_TOOLS[0]))
        engine = create_engine(where)
        table.create(engine)
        with engine.begin() as connection:
            connection.execute(table.insert(), list(filled))
        engine.dispose()
    elif source == "arrow":
        filled.save_to_disk(tmp_path)
        where = tmp_path
    elif source == "json text":
        where = jsonl(
            tmp_path / "x.jsonl",
            [{"messages": json.dumps(one["messages"]), "tools": json.dumps(one["tools"])} for one in filled],
        )
    else:
        {"parquet": filled.to_parquet, "jsonl": filled.to_json, "json": partial(filled.to_json, lines=False)}[source](
            where
        )
    rows, form = read_rows(str(where), **how).rows, FormatConfig(prompt_type="messages", tools_key="tools")
    assert rows == TWO_TOOLS or source not in ("parquet", "arrow", "hub")
    assert all(row["answer"] is None for row in rows if source != "json text")
    for row, expected in zip(rows, TWO_TOOLS, strict=True):
        assert formats.tools(row, form) == formats.tools(expected, form)
        assert formats.demonstration(row, form) == formats.demonstration(expected, form)


def test_nulls_that_a_user_wrote_reach_reward_functions(tmp_path):
    """A run's fingerprint of its rows covers them, too."""
    rows = [{"info": {"hint": None, "level": 3}}]
    assert read_rows(str(jsonl(tmp_path / "x.jsonl", rows))).rows == rows


def test_missing_paths(tmp_path):
    for path, key in ((f"{tmp_path}/nowhere", f"{tmp_path}/nowhere"), ("", "path"), (str(tmp_path), "split")):
        with raising(DataError, key=key):
            read_rows(path)


def test_hub_without_network_names_the_fix(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError):
        read_rows("nobody/nothing", "test", "main")


def test_hub_rows_come_through_datasets(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    read = read_rows("openai/gsm8k", "test", "main")
    assert read.rows == ROWS and str(read.locations[1]) == "openai/gsm8k (test):2"
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]


def test_sql_table_in_key_order(tmp_path):
    import sqlite3

    with sqlite3.connect(tmp_path / "tasks.db") as connection:
        connection.execute("create table gsm8k (id integer primary key, question text)")
        connection.executemany("insert into gsm8k values (?, ?)", [(2, "b"), (1, "a")])
    url = f"sqlite:///{tmp_path / 'tasks.db'}"
    assert read_rows(url, storage="sql", table="gsm8k").rows == [{"id": 1, "question": "a"}, {"id": 2, "question": "b"}]
    with raising(DataError, key="none"):
        read_rows(url, storage="sql", table="none")
    with raising(DataError, key="storage_type"):
        read_rows(url, storage="queue")


def test_two_columns_of_a_name_are_refused(tmp_path):
    (tmp_path / "train.csv").write_text("question,answer,question\na,b,c\n")
    with raising(DataError, key="question"):
        read_rows(str(tmp_path / "train.csv"))


def test_files_that_other_tools_wrote_are_read(tmp_path):
    """By pandas, pyarrow and datasets, each with its defaults."""
    import pyarrow
    from datasets import Dataset
    from pyarrow import feather

    frame = Dataset.from_list(ROWS).to_pandas()
    frame.to_json(tmp_path / "a.jsonl.gz", orient="records", lines=True)
    frame.to_csv(tmp_path / "b.tsv", sep="\t", index=False)
    frame.to_csv(tmp_path / "c.csv.gz", index=False)
    frame.to_json(tmp_path / "d.json.gz", orient="records")
    table = pyarrow.Table.from_pandas(frame)
    feather.write_feather(table, str(tmp_path / "e.feather"))
    for name, writer in (("f.arrow", pyarrow.ipc.new_file), ("g.arrow", pyarrow.ipc.new_stream)):
        with writer(str(tmp_path / name), table.schema) as file:
            file.write_table(table)
    for file in sorted(tmp_path.iterdir()):
        read = read_rows(str(file))
        assert read.rows == ROWS and not read.rejected, file
        assert str(read.locations[0]).startswith(f"{file}:")


def test_what_datasets_saved_to_disk_is_read(tmp_path):
    from datasets import Dataset, DatasetDict

    whole = Dataset.from_list(ROWS)
    whole.select([4, 0]).save_to_disk(tmp_path / "one")
    assert read_rows(str(tmp_path / "one")).rows == [ROWS[4], ROWS[0]]
    DatasetDict(train=whole, test=whole.select([1])).save_to_disk(
        tmp_path / "splits", num_shards={"train": 2, "test": 1}
    )
    assert read_rows(str(tmp_path / "splits"), "train").rows == ROWS
    assert read_rows(str(tmp_path / "splits"), "test").rows == [ROWS[1]]
    with raising(DataError, key="split"):
        read_rows(str(tmp_path / "splits"), "validation")


@pytest.mark.parametrize("source", ["hub", "parquet", "disk"])
def test_class_numbers_are_read_as_the_names_of_the_classes(tmp_path, source, monkeypatch):
    """As in cais/mmlu, where the right choice of `answer` 1 is B; -1 stands for an unknown one."""
    import datasets

    features = {"question": datasets.Value("string"), "answer": datasets.ClassLabel(names=["A", "B", "C", "D"])}
    rows = {"question": ["2 + 2?", "3 + 3?", "4 + 4?"], "answer": [1, 3, -1]}
    labelled = datasets.Dataset.from_dict(rows, datasets.Features(features))
    where = str(tmp_path)
    if source == "hub":
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: labelled)
        where = "cais/mmlu"
    elif source == "disk":
        labelled.save_to_disk(where)
    else:
        labelled.to_parquet(tmp_path / "test-00000-of-00001.parquet")
    assert [row["answer"] for row in read_rows(where, "test" if source == "parquet" else "train").rows] == [
        "B",
        "D",
        None,
    ]


def test_a_pattern_names_files_that_are_one_data_set(tmp_path):
    for name in ("easy/b.jsonl", "easy/a.jsonl", "hard/a.jsonl", "notes.txt"):
        jsonl(tmp_path / name, [{"file": name}])
    assert [row["file"] for row in read_rows(f"{tmp_path}/**/a.*").rows] == ["easy/a.jsonl", "hard/a.jsonl"]
    assert [row["file"] for row in read_rows(f"{tmp_path}/easy/*").rows] == ["easy/a.jsonl", "easy/b.jsonl"]
    with raising(DataError, key=f"{tmp_path}/*.csv"):
        read_rows(f"{tmp_path}/*.csv")


@pytest.mark.parametrize("names", [["0f3a9bc1.jsonl", "9c2b33aa.jsonl"], ["part-00000.jsonl", "part-00001-x.jsonl"]])
def test_parts_without_a_split_are_the_train_split(tmp_path, names):
    for name in names:
        jsonl(tmp_path / name, [{"file": name}])
    assert [row["file"] for row in read_rows(str(tmp_path)).rows] == names
    with pytest.raises(DataError):
        read_rows(str(tmp_path), "test")


@pytest.mark.parametrize(
    "names",
    [
        ["1-train.jsonl", "2-test.jsonl"],
        ["hard.jsonl.gz"],
        ["hard.jsonl"],
        ["0.json", "1.jsonl"],
        ["train.json", "train.jsonl"],
        ["train-0.csv", "train-0.jsonl", "train-1.jsonl"],
    ],
)
def test_files_of_other_names_or_of_several_formats_are_no_train_split(tmp_path, names):
    for name in names:
        jsonl(tmp_path / name, [{"a": 1}])
    with raising(DataError, key="split"):
        read_rows(str(tmp_path))


def test_a_column_of_class_names_stays_though_the_file_says_that_it_has_numbers(tmp_path):
    """As written by pyarrow after an edit of a column."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    numbers = datasets.Dataset.from_dict(
        {"label": [0, 1]}, datasets.Features({"label": datasets.ClassLabel(names=["neg", "pos"])})
    )
    numbers.to_parquet(tmp_path / "train.parquet")
    table = parquet.read_table(tmp_path / "train.parquet")
    parquet.write_table(table.set_column(0, "label", pyarrow.array(["neg", "pos"])), tmp_path / "train.parquet")
    assert [row["label"] for row in read_rows(str(tmp_path)).rows] == ["neg", "pos"]


@pytest.mark.parametrize("one, other", [
    (Decimal("1.0"), Decimal("2.0")), (date(2020, 1, 1), date(2021, 1, 1)), (b"a", b"b"),
])  # fmt: skip
def test_the_fingerprint_covers_values_that_json_lacks(one, other):
    assert fingerprint([{"a": one}]) == fingerprint([{"a": one}]) != fingerprint([{"a": other}])
