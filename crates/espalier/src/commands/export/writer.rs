//! The file or folder that an export writes.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use export::{
    Facts, Source,
    atif::{self, AtifOptions},
    capture_lines,
    chat::{self, ChatLine},
    parquet::{Columns, ParquetFile},
    row_lines, verl, write_lines,
};
use serde::Serialize;
use serde_json::json;

use super::{Arguments, Format};
use crate::{
    atomic::{AtomicFile, unwritable},
    error::CliError,
};

/// Where lines go.
enum Out {
    Folder(PathBuf),
    Lines(AtomicFile),
    Parquet(Box<ParquetFile<AtomicFile>>),
}

/// Writes rollouts in one format.
pub(super) struct Writer {
    format: Format,
    path: PathBuf,
    out: Out,
    atif: AtifOptions,
    lines: usize,
    bytes: u64,
}

/// Lines that were written, or why none was.
type Written = Result<usize, &'static str>;

impl Writer {
    pub(super) fn create(
        arguments: &Arguments,
        parquet: bool,
        selection: &str,
    ) -> Result<Self, CliError> {
        let (format, path) = (arguments.format, arguments.out.as_path());
        let out = match (format, parquet) {
            (Format::Atif, _) => {
                std::fs::create_dir_all(path).map_err(|error| unwritable(path, error))?;
                Out::Folder(path.to_owned())
            }
            (_, false) => Out::Lines(AtomicFile::create(path)?),
            (_, true) => {
                let columns = match format {
                    Format::Verl => Columns::verl(),
                    Format::Sft => Columns::chat(true),
                    Format::Messages => Columns::chat(false),
                    _ => Columns::rows(),
                };
                let note = json!({
                    "format": format.name(),
                    "selection": selection,
                    "reward_min": arguments.reward_min,
                    "split": arguments.split,
                    "tokens_max": arguments.tokens_max,
                    "espalier": env!("CARGO_PKG_VERSION"),
                });
                let file = AtomicFile::create(path)?;
                let file = ParquetFile::new(file, columns, &note.to_string())
                    .map_err(|error| unwritable(path, error))?;
                Out::Parquet(Box::new(file))
            }
        };
        Ok(Self {
            format,
            path: path.to_owned(),
            out,
            atif: AtifOptions {
                prompt_ids: arguments.prompt_ids,
            },
            lines: 0,
            bytes: 0,
        })
    }

    /// Writes one rollout. `session` is its number in its group.
    pub(super) fn write(
        &mut self,
        source: &Source<'_>,
        session: usize,
    ) -> Result<Written, CliError> {
        let has_messages = !matches!(self.format, Format::Rows);
        if has_messages && matches!(self.out, Out::Parquet(_)) && source.has_images() {
            return Ok(Err("images, which only JSON lines hold"));
        }
        match self.format {
            Format::Atif => self.atif(source),
            Format::Rows => self.lines(&row_lines(&source.rows, Facts::of(source))),
            Format::Verl => self.lines(&verl::verl_lines(source, session, self.lines)),
            Format::Sft => self.chat(chat::chat_lines(source, true)),
            Format::Messages => self.chat(chat::chat_lines(source, false)),
            Format::Captures => self.lines(&capture_lines(source)),
        }
    }

    fn chat(&mut self, mut lines: Vec<ChatLine<'_>>) -> Result<Written, CliError> {
        if matches!(self.out, Out::Parquet(_)) {
            lines = lines.into_iter().map(ChatLine::for_parquet).collect();
        }
        self.lines(&lines)
    }

    fn lines<T: Serialize>(&mut self, lines: &[T]) -> Result<Written, CliError> {
        if lines.is_empty() {
            return Ok(Err("nothing of it can be trained"));
        }
        let path = &self.path;
        match &mut self.out {
            Out::Lines(file) => {
                write_lines(file, lines).map_err(|error| unwritable(path, error))?;
            }
            Out::Parquet(file) => file.write(lines).map_err(|error| unwritable(path, error))?,
            Out::Folder(_) => {}
        }
        self.lines += lines.len();
        Ok(Ok(lines.len()))
    }

    fn atif(&mut self, source: &Source<'_>) -> Result<Written, CliError> {
        let Some(files) = atif::trajectory(source, self.atif) else {
            return Ok(Err("no reply in the main conversation"));
        };
        let Out::Folder(folder) = &self.out else {
            return Ok(Ok(0));
        };
        // Images first: a document never names a file that is not there.
        for image in &files.images {
            self.bytes += AtomicFile::write_all_to(&folder.join(&image.path), &image.bytes)?;
        }
        let path = folder.join(format!("{}.json", source.rollout.spec.id));
        let mut file = AtomicFile::create(&path)?;
        write_pretty(&mut file, &path, &files.trajectory)?;
        self.bytes += file.finish()?;
        Ok(Ok(1))
    }

    /// Puts the file in its place; bytes written.
    pub(super) fn finish(self) -> Result<u64, CliError> {
        let path = &self.path;
        match self.out {
            Out::Folder(_) => Ok(self.bytes),
            Out::Lines(file) => file.finish(),
            Out::Parquet(file) => file
                .finish()
                .map_err(|error| unwritable(path, error))?
                .finish(),
        }
    }
}

fn write_pretty(
    file: &mut AtomicFile,
    path: &Path,
    document: &impl Serialize,
) -> Result<(), CliError> {
    serde_json::to_writer(&mut *file, document)
        .map_err(std::io::Error::from)
        .and_then(|()| file.write_all(b"\n"))
        .map_err(|error| unwritable(path, error))
}
