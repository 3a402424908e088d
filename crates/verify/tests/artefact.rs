//! Text out of artefacts: small files of each kind made here, and hostile ones.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests are not in a test function"
)]

use std::{
    io::{Cursor, Write},
    path::Path,
};

use proptest::prelude::*;
use serde_json::json;
use verify::artefact::{TEXT_CHARS_MAX, Text, text_of};

fn archive(parts: &[(&str, &str)]) -> Vec<u8> {
    let mut writer = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, text) in parts {
        writer
            .start_file(*name, zip::write::SimpleFileOptions::default())
            .unwrap();
        writer.write_all(text.as_bytes()).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

fn whole(name: &str, content: &[u8]) -> String {
    match text_of(Path::new(name), content) {
        Text::Whole(text, false) => text,
        other => panic!("{name}: {other:?}"),
    }
}

#[test]
fn a_document_gives_its_paragraphs() {
    let xml = "<w:document xmlns:w=\"w\"><w:body><w:p><w:r><w:t>First &amp; </w:t><w:t>second</w:t></w:r></w:p>\
               <w:p><w:r><w:t>Third</w:t></w:r><w:delText>gone</w:delText></w:p></w:body></w:document>";
    let text = whole("a.docx", &archive(&[("word/document.xml", xml)]));
    assert_eq!(text, "First & second\nThird\n");
}

#[test]
fn a_spreadsheet_gives_its_cells() {
    let text = whole(
        "a.xlsx",
        &archive(&[
            (
                "[Content_Types].xml",
                "<Types xmlns=\"http://schemas.openxmlformats.org/package/2006/content-types\"/>",
            ),
            (
                "_rels/.rels",
                "<Relationships xmlns=\"http://schemas.openxmlformats.org/package/2006/relationships\"><Relationship Id=\"rId1\" Type=\"http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument\" Target=\"xl/workbook.xml\"/></Relationships>",
            ),
            (
                "xl/workbook.xml",
                "<workbook xmlns=\"http://schemas.openxmlformats.org/spreadsheetml/2006/main\" xmlns:r=\"http://schemas.openxmlformats.org/officeDocument/2006/relationships\"><sheets><sheet name=\"Q1\" sheetId=\"1\" r:id=\"rId1\"/></sheets></workbook>",
            ),
            (
                "xl/_rels/workbook.xml.rels",
                "<Relationships xmlns=\"http://schemas.openxmlformats.org/package/2006/relationships\"><Relationship Id=\"rId1\" Type=\"http://schemas.openxmlformats.org/officeDocument/2006/relationships/worksheet\" Target=\"worksheets/sheet1.xml\"/></Relationships>",
            ),
            (
                "xl/worksheets/sheet1.xml",
                "<worksheet xmlns=\"http://schemas.openxmlformats.org/spreadsheetml/2006/main\"><sheetData><row r=\"1\"><c r=\"A1\" t=\"inlineStr\"><is><t>name</t></is></c><c r=\"B1\"><v>2.5</v></c></row></sheetData></worksheet>",
            ),
        ]),
    );
    assert_eq!(text, "## sheet Q1\nname\t2.5\n");
}

#[test]
fn a_notebook_gives_sources_and_outputs() {
    let book = json!({"cells": [
        {"cell_type": "markdown", "source": ["# T\n", "words"]},
        {"cell_type": "code", "source": "1 + 1", "outputs": [{"data": {"text/plain": ["2"]}}, {"text": "said"}]}]});
    let text = whole("a.ipynb", book.to_string().as_bytes());
    assert_eq!(
        text,
        "## markdown 1\n# T\nwords\n## code 2\n1 + 1\n### output\n2\n### output\nsaid\n"
    );
}

#[test]
fn a_database_gives_schema_and_rows() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.db");
    let connection = rusqlite::Connection::open(&file).unwrap();
    connection
        .execute_batch("CREATE TABLE t (a, b); INSERT INTO t VALUES (1, 'x'), (NULL, 2.5);")
        .unwrap();
    drop(connection);
    let text = whole("any.bin", &std::fs::read(file).unwrap());
    assert_eq!(text, "## table t\nCREATE TABLE t (a, b)\n1\tx\n\t2.5\n");
}

/// A PDF of two pages as a printer writes it: a standard font, text operators, a table of offsets.
fn pdf(pages: &[&str]) -> Vec<u8> {
    let kids: String = (0..pages.len())
        .map(|page| format!("{} 0 R ", 4 + 2 * page))
        .collect();
    let mut objects = vec![
        "<< /Type /Catalog /Pages 2 0 R >>".to_owned(),
        format!("<< /Type /Pages /Kids [{kids}] /Count {} >>", pages.len()),
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
            .to_owned(),
    ];
    for (page, text) in pages.iter().enumerate() {
        let content = format!("BT /F1 12 Tf 72 720 Td ({text}) Tj ET");
        objects.push(format!(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> /Contents {} 0 R >>",
            5 + 2 * page
        ));
        objects.push(format!(
            "<< /Length {} >>\nstream\n{content}\nendstream",
            content.len()
        ));
    }
    let mut out = b"%PDF-1.4\n".to_vec();
    let mut offsets = Vec::new();
    for (index, object) in objects.iter().enumerate() {
        offsets.push(out.len());
        out.extend(format!("{} 0 obj\n{object}\nendobj\n", index + 1).bytes());
    }
    let start = out.len();
    let count = objects.len() + 1;
    out.extend(format!("xref\n0 {count}\n0000000000 65535 f \n").bytes());
    for offset in offsets {
        out.extend(format!("{offset:010} 00000 n \n").bytes());
    }
    out.extend(
        format!("trailer\n<< /Size {count} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n").bytes(),
    );
    out
}

#[test]
fn a_pdf_gives_the_text_of_its_pages() {
    let text = whole(
        "report.pdf",
        &pdf(&["Revenue rose by 12.5 percent", "Second page, last words"]),
    );
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    assert_eq!(
        lines,
        ["Revenue rose by 12.5 percent", "Second page, last words"]
    );
}

#[test]
fn what_cannot_be_read_says_why() {
    for (name, content) in [
        ("a.png", &b"\x89PNG\0\0"[..]),
        ("a.xlsx", b"no archive"),
        ("a.docx", b"PK\x03\x04 cut"),
        ("a.pdf", b"%PDF-1.4 nothing"),
        ("a.ipynb", b"{}"),
        ("a.db", b"SQLite format 3\0 and then nonsense"),
    ] {
        assert!(
            matches!(text_of(Path::new(name), content), Text::Nothing(why) if !why.is_empty()),
            "{name}"
        );
    }
    let long = "x".repeat(TEXT_CHARS_MAX + 5);
    assert!(
        matches!(text_of(Path::new("a.txt"), long.as_bytes()), Text::Whole(text, true) if text.len() == TEXT_CHARS_MAX)
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Agents choose name and content: nothing may bring the judge down.
    #[test]
    fn any_bytes_under_any_name_are_survived(
        content in prop::collection::vec(any::<u8>(), 0..400),
        end in prop::sample::select(vec!["xlsx", "xls", "ods", "docx", "pptx", "ipynb", "db", "txt"]),
        head in prop::sample::select(vec![&b""[..], b"PK\x03\x04", b"SQLite format 3\0", b"\xd0\xcf\x11\xe0"]),
    ) {
        let bytes = [head, &content].concat();
        let _ = text_of(Path::new(&format!("a.{end}")), &bytes);
    }
}
