//! Lines as Parquet: the same serde types as JSON lines, with a schema beside them.

use std::io::Write;
use std::sync::Arc;

use arrow_json::{ReaderBuilder, reader::Decoder};
use arrow_schema::{DataType, Field, Fields, Schema, SchemaRef};
use parquet::{
    arrow::ArrowWriter,
    basic::Compression,
    file::{metadata::KeyValue, properties::WriterProperties},
};
use serde::Serialize;

/// Bytes that are collected before they are written: a group of rows.
pub const GROUP_BYTES_MAX: usize = 64 << 20;

/// Name of the file's note on where it came from: a JSON object.
pub const NOTE: &str = "espalier";

/// Why lines did not become Parquet.
#[derive(Debug, thiserror::Error)]
pub enum ParquetError {
    /// A line does not fit its schema.
    #[error(
        "a line does not fit the columns of {what}: {source}; this is a defect of the exporter"
    )]
    Line {
        /// The kind of line.
        what: &'static str,
        /// What was found.
        source: arrow_schema::ArrowError,
    },
    /// The file could not be written.
    #[error("{0}")]
    Write(#[from] parquet::errors::ParquetError),
}

/// A kind of line with its columns.
#[derive(Debug, Clone)]
pub struct Columns {
    what: &'static str,
    schema: SchemaRef,
}

/// A Parquet file being written.
pub struct ParquetFile<W: Write + Send> {
    what: &'static str,
    decoder: Decoder,
    writer: ArrowWriter<W>,
}

impl<W: Write + Send> std::fmt::Debug for ParquetFile<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ParquetFile")
            .field("what", &self.what)
            .finish_non_exhaustive()
    }
}

impl<W: Write + Send> ParquetFile<W> {
    /// A file with columns and a note on where it came from (JSON).
    ///
    /// # Errors
    /// [`ParquetError::Write`].
    pub fn new(out: W, columns: Columns, note: &str) -> Result<Self, ParquetError> {
        let Columns { what, schema } = columns;
        let settings = WriterProperties::builder()
            .set_compression(Compression::SNAPPY)
            .set_created_by(format!("espalier {}", env!("CARGO_PKG_VERSION")))
            .set_key_value_metadata(Some(vec![KeyValue::new(NOTE.to_owned(), note.to_owned())]))
            .build();
        let decoder = ReaderBuilder::new(Arc::clone(&schema))
            .build_decoder()
            .map_err(|source| ParquetError::Line { what, source })?;
        Ok(Self {
            what,
            decoder,
            writer: ArrowWriter::try_new(out, schema, Some(settings))?,
        })
    }

    /// Appends lines.
    ///
    /// # Errors
    /// [`ParquetError`]; the file is then of no use.
    pub fn write<T: Serialize>(&mut self, lines: &[T]) -> Result<(), ParquetError> {
        let what = self.what;
        let failed = |source| ParquetError::Line { what, source };
        self.decoder.serialize(lines).map_err(failed)?;
        if let Some(batch) = self.decoder.flush().map_err(failed)? {
            self.writer.write(&batch)?;
        }
        if self.writer.in_progress_size() >= GROUP_BYTES_MAX {
            self.writer.flush()?;
        }
        Ok(())
    }

    /// Ends the file and gives the writer back.
    ///
    /// # Errors
    /// [`ParquetError::Write`].
    pub fn finish(self) -> Result<W, ParquetError> {
        Ok(self.writer.into_inner()?)
    }
}

fn list(of: DataType) -> DataType {
    DataType::List(Arc::new(Field::new("element", of, true)))
}

fn group(fields: Vec<Field>) -> DataType {
    DataType::Struct(Fields::from(fields))
}

fn text(name: &str) -> Field {
    Field::new(name, DataType::Utf8, true)
}

fn int(name: &str) -> Field {
    Field::new(name, DataType::Int64, true)
}

fn real(name: &str) -> Field {
    Field::new(name, DataType::Float64, true)
}

fn ints(name: &str) -> Field {
    Field::new(name, list(DataType::Int64), true)
}

fn mask(name: &str) -> Field {
    Field::new(name, list(DataType::Int8), true)
}

fn reals(name: &str) -> Field {
    Field::new(name, list(DataType::Float32), true)
}

fn facts() -> Vec<Field> {
    let mut fields: Vec<Field> = ["rollout", "group", "task", "harness", "selection"]
        .into_iter()
        .map(text)
        .collect();
    fields.extend(["reward", "advantage"].into_iter().map(real));
    fields
}

fn messages(name: &str, weight: bool) -> Field {
    let function = group(vec![text("name"), text("arguments")]);
    let tool_call = group(vec![
        text("id"),
        text("type"),
        Field::new("function", function, true),
    ]);
    let mut fields = vec![
        text("role"),
        text("content"),
        text("reasoning_content"),
        Field::new("tool_calls", list(tool_call), true),
        text("tool_call_id"),
    ];
    if weight {
        fields.push(Field::new("weight", DataType::Int8, true));
    }
    Field::new(name, list(group(fields)), true)
}

impl Columns {
    fn of(what: &'static str, fields: Vec<Field>) -> Self {
        Self {
            what,
            schema: Arc::new(Schema::new(fields)),
        }
    }

    /// Of [`crate::rows::RowLine`].
    #[must_use]
    pub fn rows() -> Self {
        let mut fields = facts();
        fields.extend(["row", "rows", "rollout_terms"].into_iter().map(int));
        fields.extend([
            ints("tokens"),
            int("prompt_tokens"),
            mask("loss_mask"),
            reals("logprobs"),
            reals("logprobs_model"),
            ints("versions"),
            ints("calls"),
            int("tokens_cut"),
        ]);
        Self::of("rows", fields)
    }

    /// Of [`crate::chat::ChatLine`].
    #[must_use]
    pub fn chat(weight: bool) -> Self {
        let mut fields = vec![messages("messages", weight), text("tools")];
        fields.extend(facts());
        fields.extend([
            text("class"),
            int("row"),
            int("rows"),
            ints("calls"),
            ints("versions"),
        ]);
        Self::of("messages", fields)
    }

    /// Of [`crate::verl::VerlLine`].
    #[must_use]
    pub fn verl() -> Self {
        let mut extra = vec![int("index"), text("split")];
        extra.extend(facts());
        extra.extend(
            ["row", "rows", "rollout_terms", "tokens_cut"]
                .into_iter()
                .map(int),
        );
        let metrics = ["generate_sequences", "tool_calls", "compute_score"];
        let versions = ["min_global_steps", "max_global_steps"];
        Self::of(
            "veRL rows",
            vec![
                text("data_source"),
                messages("prompt", false),
                text("ability"),
                Field::new(
                    "reward_model",
                    group(vec![text("style"), text("ground_truth")]),
                    true,
                ),
                Field::new("extra_info", group(extra), true),
                text("uid"),
                int("session_id"),
                ints("prompt_ids"),
                ints("response_ids"),
                mask("response_mask"),
                reals("response_logprobs"),
                real("reward_score"),
                int("num_turns"),
                Field::new(
                    "metrics",
                    group(metrics.into_iter().map(real).collect()),
                    true,
                ),
                Field::new(
                    "extra_fields",
                    group(versions.into_iter().map(int).collect()),
                    true,
                ),
            ],
        )
    }
}
