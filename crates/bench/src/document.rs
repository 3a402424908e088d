//! A report as blocks, written as Markdown or as one HTML page that needs nothing else.

use std::fmt::Write as _;

/// A part of a document.
#[derive(Debug, Clone, PartialEq)]
pub enum Block {
    /// A heading of the second level.
    Heading(String),
    /// A paragraph.
    Text(String),
    /// A table.
    Table {
        /// Names of the columns.
        header: Vec<String>,
        /// Cells by row; as many as there are columns.
        rows: Vec<Vec<String>>,
    },
    /// A drawing.
    Plot {
        /// Its file's name without `.svg`.
        name: String,
        /// What it shows.
        caption: String,
        /// The drawing.
        svg: String,
    },
}

/// A titled list of blocks.
#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    /// The title.
    pub title: String,
    /// Its parts.
    pub blocks: Vec<Block>,
}

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:72em;margin:2em auto;padding:0 1em}\
table{border-collapse:collapse;margin:1em 0}th,td{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}\
th{border-bottom:2px solid #888}figure{margin:1.5em 0}figcaption{color:#555}h2{margin-top:2em}svg{max-width:100%;height:auto}";

/// Text without meaning in HTML.
fn plain(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// A cell of a Markdown table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

impl Document {
    /// An empty one.
    #[must_use]
    pub fn new(title: &str) -> Self {
        Self {
            title: title.to_owned(),
            blocks: Vec::new(),
        }
    }

    /// Adds a heading.
    pub fn heading(&mut self, text: &str) {
        self.blocks.push(Block::Heading(text.to_owned()));
    }

    /// Adds a paragraph.
    pub fn text(&mut self, text: impl Into<String>) {
        self.blocks.push(Block::Text(text.into()));
    }

    /// Adds a table; nothing when it has no rows.
    pub fn table(&mut self, header: &[&str], rows: Vec<Vec<String>>) {
        if !rows.is_empty() {
            let header = header.iter().map(|&name| name.to_owned()).collect();
            self.blocks.push(Block::Table { header, rows });
        }
    }

    /// Adds a drawing; nothing when it could not be drawn.
    pub fn plot(&mut self, name: &str, caption: &str, svg: Option<String>) {
        if let Some(svg) = svg {
            self.blocks.push(Block::Plot {
                name: name.to_owned(),
                caption: caption.to_owned(),
                svg,
            });
        }
    }

    /// Drawings by file name without `.svg`.
    pub fn plots(&self) -> impl Iterator<Item = (&str, &str)> {
        self.blocks.iter().filter_map(|block| match block {
            Block::Plot { name, svg, .. } => Some((name.as_str(), svg.as_str())),
            _ => None,
        })
    }

    /// As Markdown; drawings are files beside it.
    #[must_use]
    pub fn to_markdown(&self) -> String {
        let mut out = format!("# {}\n", self.title);
        for block in &self.blocks {
            out.push('\n');
            match block {
                Block::Heading(text) => out.push_str(&format!("## {text}\n")),
                Block::Text(text) => out.push_str(&format!("{text}\n")),
                Block::Table { header, rows } => {
                    let line = |cells: &[String]| {
                        let cells: Vec<String> = cells.iter().map(|text| cell(text)).collect();
                        format!("| {} |\n", cells.join(" | "))
                    };
                    out.push_str(&line(header));
                    out.push_str(&format!("|{}\n", "---|".repeat(header.len())));
                    for row in rows {
                        out.push_str(&line(row));
                    }
                }
                Block::Plot { name, caption, .. } => {
                    out.push_str(&format!("![{caption}]({name}.svg)\n"));
                }
            }
        }
        out
    }

    /// As one HTML page: style and drawings are in it, scripts there are none.
    #[must_use]
    pub fn to_html(&self) -> String {
        let title = plain(&self.title);
        let mut out = format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\n\
             <style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n"
        );
        for block in &self.blocks {
            // Writing to a string does not fail.
            let _ = match block {
                Block::Heading(text) => writeln!(out, "<h2>{}</h2>", plain(text)),
                Block::Text(text) => writeln!(out, "<p>{}</p>", plain(text)),
                Block::Table { header, rows } => {
                    let line = |cells: &[String], tag: &str| -> String {
                        let cells: String = cells
                            .iter()
                            .map(|text| format!("<{tag}>{}</{tag}>", plain(text)))
                            .collect();
                        format!("<tr>{cells}</tr>\n")
                    };
                    let rows: String = rows.iter().map(|row| line(row, "td")).collect();
                    writeln!(out, "<table>\n{}{rows}</table>", line(header, "th"))
                }
                Block::Plot { caption, svg, .. } => writeln!(
                    out,
                    "<figure>\n{}\n<figcaption>{}</figcaption></figure>",
                    svg.trim(),
                    plain(caption)
                ),
            };
        }
        out.push_str("</body></html>\n");
        out
    }
}

/// Rows as CSV (RFC 4180), header first.
#[must_use]
pub fn csv(header: &[&str], rows: &[Vec<String>]) -> String {
    let field = |text: &str| {
        if text.contains([',', '"', '\n', '\r']) {
            format!("\"{}\"", text.replace('"', "\"\""))
        } else {
            text.to_owned()
        }
    };
    let mut out = header.join(",");
    out.push('\n');
    for row in rows {
        let cells: Vec<String> = row.iter().map(|text| field(text)).collect();
        out.push_str(&cells.join(","));
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_task_is_called_cannot_break_a_page() {
        let mut document = Document::new("a & b");
        document.table(&["x"], vec![vec!["<script>|".into()]]);
        document.table(&["nothing"], Vec::new());
        document.plot("p", "a plot", Some("<svg></svg>".into()));
        document.plot("q", "none", None);
        let html = document.to_html();
        assert!(html.contains("<td>&lt;script&gt;|</td>") && html.contains("<h1>a &amp; b</h1>"));
        assert!(html.contains("<svg></svg>") && !html.contains("nothing"));
        assert_eq!(
            document.to_markdown(),
            "# a & b\n\n| x |\n|---|\n| <script>\\| |\n\n![a plot](p.svg)\n"
        );
        assert_eq!(document.plots().count(), 1);
        assert_eq!(
            csv(&["a", "b"], &[vec!["1,2".into(), "say \"x\"".into()]]),
            "a,b\n\"1,2\",\"say \"\"x\"\"\"\n"
        );
    }
}
