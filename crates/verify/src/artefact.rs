//! Text out of the files that agents leave: what a judge can read of them.
//!
//! | kind | by | what |
//! |---|---|---|
//! | xlsx, xlsm, xls, ods | `calamine` | each sheet as tab-separated rows |
//! | docx, pptx | `zip`, `quick-xml` | the text, a line per paragraph |
//! | pdf | `pdf-extract` | the text of its pages |
//! | ipynb | JSON | sources and text outputs of its cells |
//! | sqlite, db | `rusqlite` | schema, and the first rows of each table |
//! | anything in UTF-8 | – | itself |
//!
//! These files come from an agent and may be hostile: each library runs under limits, and an
//! unreadable file is a sentence, not an error of ours. A panic inside of a library is caught.

use std::{
    fmt::Write as _,
    io::{Cursor, Read, Write as _},
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use serde_json::Value;

/// Text kept of one file, in characters (JobBench's cap).
pub const TEXT_CHARS_MAX: usize = 200_000;
/// Larger files are not opened.
pub const FILE_BYTES_MAX: usize = 64 << 20;
/// Bytes unpacked of one part of an archive.
const PART_BYTES_MAX: u64 = 32 << 20;
/// Rows shown of a table.
const ROWS_MAX: usize = 2_000;

/// What can be read of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Text {
    /// Its text, cut to [`TEXT_CHARS_MAX`]; whether it was cut.
    Whole(String, bool),
    /// Nothing, and why: a picture, an unknown kind, a broken file.
    Nothing(String),
}

/// Reads what can be read of a file, by its name's end and its first bytes.
#[must_use]
pub fn text_of(path: &Path, content: &[u8]) -> Text {
    if content.len() > FILE_BYTES_MAX {
        return Text::Nothing(format!("{} bytes are too many to read", content.len()));
    }
    let end = path
        .extension()
        .and_then(|end| end.to_str())
        .unwrap_or_default()
        .to_ascii_lowercase();
    let read = || -> Result<String, String> {
        match end.as_str() {
            "xlsx" | "xlsm" => sheets::<calamine::Xlsx<_>>(content),
            "xls" => sheets::<calamine::Xls<_>>(content),
            "ods" => sheets::<calamine::Ods<_>>(content),
            "docx" => office(content, |name| name == "word/document.xml"),
            "pptx" => office(content, |name| {
                name.starts_with("ppt/slides/slide") && name.ends_with(".xml")
            }),
            "pdf" => pdf_extract::extract_text_from_mem_by_pages(content)
                .map(|pages| pages.join("\n"))
                .map_err(|error| error.to_string()),
            "ipynb" => notebook(content),
            _ if content.starts_with(b"SQLite format 3\0") => database(content),
            _ if content.contains(&0) => Err("binary".to_owned()),
            _ => String::from_utf8(content.to_vec()).map_err(|_| "not UTF-8".to_owned()),
        }
    };
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(Ok(text)) => cut(text),
        Ok(Err(reason)) => Text::Nothing(reason),
        Err(_) => Text::Nothing("the reader of this kind gave up on it".to_owned()),
    }
}

fn cut(text: String) -> Text {
    match text.char_indices().nth(TEXT_CHARS_MAX) {
        None => Text::Whole(text, false),
        Some((at, _)) => Text::Whole(text[..at].to_owned(), true),
    }
}

fn sheets<'a, B>(content: &'a [u8]) -> Result<String, String>
where
    B: calamine::Reader<Cursor<&'a [u8]>>,
    B::Error: std::fmt::Display,
{
    let mut book = B::new(Cursor::new(content)).map_err(|error| error.to_string())?;
    let mut out = String::new();
    for name in book.sheet_names() {
        let range = book
            .worksheet_range(&name)
            .map_err(|error| error.to_string())?;
        let _ = writeln!(out, "## sheet {name}");
        for row in range.rows().take(ROWS_MAX) {
            let cells: Vec<String> = row.iter().map(ToString::to_string).collect();
            let _ = writeln!(out, "{}", cells.join("\t"));
            if out.len() > TEXT_CHARS_MAX * 4 {
                return Ok(out);
            }
        }
    }
    Ok(out)
}

fn office(content: &[u8], wanted: impl Fn(&str) -> bool) -> Result<String, String> {
    let mut archive =
        zip::ZipArchive::new(Cursor::new(content)).map_err(|error| error.to_string())?;
    let mut names: Vec<String> = archive
        .file_names()
        .filter_map(Result::ok)
        .filter(|name| wanted(name))
        .map(std::borrow::Cow::into_owned)
        .collect();
    if names.is_empty() {
        return Err("no text part in the archive".to_owned());
    }
    names.sort_by_key(|name| (name.len(), name.clone()));
    let mut out = String::new();
    for name in names {
        let part = archive.by_name(&name).map_err(|error| error.to_string())?;
        let mut xml = Vec::new();
        part.take(PART_BYTES_MAX)
            .read_to_end(&mut xml)
            .map_err(|error| error.to_string())?;
        paragraphs(&String::from_utf8_lossy(&xml), &mut out)?;
    }
    Ok(out)
}

/// The text of `t` elements, a line per `p`, a tab per cell.
fn paragraphs(xml: &str, out: &mut String) -> Result<(), String> {
    use quick_xml::events::Event;
    let mut reader = quick_xml::Reader::from_str(xml);
    let mut inside = false;
    loop {
        match reader.read_event().map_err(|error| error.to_string())? {
            Event::Eof => return Ok(()),
            Event::Start(tag) => inside = tag.local_name().as_ref() == "t",
            Event::End(tag) => {
                inside = false;
                match tag.local_name().as_ref() {
                    "p" => out.push('\n'),
                    "tc" => out.push('\t'),
                    _ => {}
                }
            }
            Event::Text(text) if inside => {
                out.push_str(&text);
            }
            Event::GeneralRef(name) if inside => out.push(match &*name {
                "amp" => '&',
                "lt" => '<',
                "gt" => '>',
                "quot" => '"',
                "apos" => '\'',
                _ => '?',
            }),
            _ => {}
        }
    }
}

fn notebook(content: &[u8]) -> Result<String, String> {
    let book: Value = serde_json::from_slice(content).map_err(|error| error.to_string())?;
    let text = |value: &Value| -> String {
        match value {
            Value::String(text) => text.clone(),
            Value::Array(lines) => lines.iter().filter_map(Value::as_str).collect(),
            _ => String::new(),
        }
    };
    let cells = book["cells"].as_array().ok_or("no list of cells")?;
    let mut out = String::new();
    for (index, cell) in cells.iter().enumerate() {
        let kind = cell["cell_type"].as_str().unwrap_or("cell");
        let _ = writeln!(out, "## {kind} {}\n{}", index + 1, text(&cell["source"]));
        for output in cell["outputs"].as_array().map_or(&[][..], Vec::as_slice) {
            let said = text(&output["text"]) + &text(&output["data"]["text/plain"]);
            if !said.is_empty() {
                let _ = writeln!(out, "### output\n{said}");
            }
        }
    }
    Ok(out)
}

fn database(content: &[u8]) -> Result<String, String> {
    let said = |error: rusqlite::Error| error.to_string();
    let mut file = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
    file.write_all(content).map_err(|error| error.to_string())?;
    // Immutable: neither a journal of the agent's nor one of ours is looked for.
    let place = format!("file:{}?mode=ro&immutable=1", file.path().display());
    let flags = rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY | rusqlite::OpenFlags::SQLITE_OPEN_URI;
    let connection = rusqlite::Connection::open_with_flags(place, flags).map_err(said)?;
    let mut tables: Vec<(String, String)> = Vec::new();
    {
        let sql = "SELECT name, sql FROM sqlite_schema WHERE type = 'table' AND sql IS NOT NULL ORDER BY name";
        let mut query = connection.prepare(sql).map_err(said)?;
        let mut rows = query.query([]).map_err(said)?;
        while let Some(row) = rows.next().map_err(said)? {
            tables.push((row.get(0).map_err(said)?, row.get(1).map_err(said)?));
        }
    }
    let mut out = String::new();
    for (name, schema) in tables {
        let _ = writeln!(out, "## table {name}\n{schema}");
        let quoted = name.replace('"', "\"\"");
        let mut query = connection
            .prepare(&format!("SELECT * FROM \"{quoted}\" LIMIT {ROWS_MAX}"))
            .map_err(said)?;
        let columns = query.column_count();
        let mut rows = query.query([]).map_err(said)?;
        while let Some(row) = rows.next().map_err(said)? {
            let cells: Vec<String> = (0..columns)
                .map(|at| match row.get_ref(at) {
                    Ok(rusqlite::types::ValueRef::Null) | Err(_) => String::new(),
                    Ok(rusqlite::types::ValueRef::Integer(number)) => number.to_string(),
                    Ok(rusqlite::types::ValueRef::Real(number)) => number.to_string(),
                    Ok(rusqlite::types::ValueRef::Text(text)) => {
                        String::from_utf8_lossy(text).into_owned()
                    }
                    Ok(rusqlite::types::ValueRef::Blob(bytes)) => format!("{} bytes", bytes.len()),
                })
                .collect();
            let _ = writeln!(out, "{}", cells.join("\t"));
            if out.len() > TEXT_CHARS_MAX * 4 {
                return Ok(out);
            }
        }
    }
    Ok(out)
}
