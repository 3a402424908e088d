//! TensorBoard events: scalars only, written by hand.
//!
//! The file is a row of records `length (u64) | crc(length) | data | crc(data)`, little endian,
//! with masked CRC-32C; the data is a protobuf `Event` of which four fields are used
//! (`wall_time` 1, `step` 2, `file_version` 3, `summary` 5 → `value` 1 → `tag` 1,
//! `simple_value` 2). A record that a crash cut short ends the file for its readers; everything
//! before it stays readable, and the next run of the program starts a new file.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use learner::grpo::UpdateMetrics;

use crate::{error::CliError, training::Harvest};

/// An events file that is being written.
#[derive(Debug)]
pub(crate) struct Events {
    path: PathBuf,
    file: File,
}

impl Events {
    /// Starts a new file `events.out.tfevents.SECONDS.PROCESS.espalier` in the folder, which is
    /// made when missing. TensorBoard shows all files of a folder as one run.
    ///
    /// # Errors
    /// When the system refuses the file.
    pub(crate) fn create(folder: &Path) -> Result<Self, CliError> {
        let now_s = now_s();
        let name = format!(
            "events.out.tfevents.{now_s:010.0}.{}.espalier",
            std::process::id()
        );
        let path = folder.join(name);
        let failed = |error: io::Error| failure(&path, error);
        std::fs::create_dir_all(folder).map_err(failed)?;
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(failed)?;
        let mut events = Self { path, file };
        events.write(&version(now_s))?;
        Ok(events)
    }

    /// Appends named numbers of one step. They are with the system when this returns.
    ///
    /// # Errors
    /// When the system refuses the file.
    pub(crate) fn append(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<(), CliError> {
        self.write(&summary(now_s(), step, scalars))
    }

    fn write(&mut self, event: &[u8]) -> Result<(), CliError> {
        // One write call per record, so that a crash cuts at most the last one.
        self.file
            .write_all(&framed(event))
            .map_err(|error| failure(&self.path, error))
    }

    /// Appends what one training step showed. Steps count from 1.
    ///
    /// # Errors
    /// When the system refuses the file.
    pub(crate) fn append_step(
        &mut self,
        step: u64,
        harvest: &Harvest,
        update: Option<&UpdateMetrics>,
        rollout_s: f64,
        train_s: f64,
    ) -> Result<(), CliError> {
        let mut scalars = vec![
            ("rollouts/reward", harvest.reward),
            ("rollouts/pass", harvest.pass),
            ("rollouts/fork_tokens", harvest.fork_tokens as f64),
            ("groups/zero_variance", harvest.groups_zero_variance as f64),
            ("tokens/captured", harvest.tokens_captured as f64),
            ("tokens/unique", harvest.tokens_unique as f64),
            ("tokens/trained", harvest.tokens_trained as f64),
            ("seconds/rollout", rollout_s),
            ("seconds/train", train_s),
        ];
        if let Some(update) = update {
            scalars.extend([
                ("update/loss", update.loss),
                ("update/entropy", update.entropy),
                ("update/rollout_kl", update.rollout_kl),
                ("update/clipped", update.clipped),
                ("update/gradient_norm", update.gradient_norm),
            ]);
        }
        let endings: Vec<(String, f64)> = harvest
            .endings
            .iter()
            .map(|(name, count)| (format!("endings/{name}"), *count as f64))
            .collect();
        scalars.extend(endings.iter().map(|(name, count)| (name.as_str(), *count)));
        self.append(step, &scalars)
    }
}

fn failure(path: &Path, error: io::Error) -> CliError {
    CliError::failed(
        format!("TensorBoard events {} could not be written", path.display()),
        error,
    )
}

fn now_s() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}

fn framed(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = length.to_vec();
    record.extend(masked_crc(&length).to_le_bytes());
    record.extend(data);
    record.extend(masked_crc(data).to_le_bytes());
    record
}

fn version(wall_time_s: f64) -> Vec<u8> {
    let mut event = Vec::new();
    put_f64(&mut event, 1, wall_time_s);
    put_bytes(&mut event, 3, b"brain.Event:2");
    event
}

fn summary(wall_time_s: f64, step: u64, scalars: &[(&str, f64)]) -> Vec<u8> {
    let mut values = Vec::new();
    for (tag, number) in scalars {
        let mut value = Vec::new();
        put_bytes(&mut value, 1, tag.as_bytes());
        put_key(&mut value, 2, 5);
        value.extend((*number as f32).to_le_bytes());
        put_bytes(&mut values, 1, &value);
    }
    let mut event = Vec::new();
    put_f64(&mut event, 1, wall_time_s);
    put_key(&mut event, 2, 0);
    put_varint(&mut event, step);
    put_bytes(&mut event, 5, &values);
    event
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn put_key(out: &mut Vec<u8>, field: u64, wire_type: u64) {
    put_varint(out, field << 3 | wire_type);
}

fn put_f64(out: &mut Vec<u8>, field: u64, value: f64) {
    put_key(out, field, 1);
    out.extend(value.to_le_bytes());
}

fn put_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    put_key(out, field, 2);
    put_varint(out, bytes.len() as u64);
    out.extend(bytes);
}

/// CRC-32C, rotated and shifted as the format demands. A few hundred bytes per step: bit by bit
/// is fast enough.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    enum Field {
        Varint(u64),
        Fixed64(u64),
        Fixed32(u32),
        Bytes(Vec<u8>),
    }

    fn varint(bytes: &mut &[u8]) -> u64 {
        let (mut value, mut shift) = (0, 0);
        loop {
            let byte = bytes[0];
            *bytes = &bytes[1..];
            value |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 {
                return value;
            }
        }
    }

    /// A reader that knows protobuf, and nothing of the writer above.
    fn fields(mut bytes: &[u8]) -> Vec<(u64, Field)> {
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let mut take = |count: usize| {
                let (head, rest) = bytes.split_at(count);
                bytes = rest;
                head.to_vec()
            };
            let field = match key & 7 {
                1 => Field::Fixed64(u64::from_le_bytes(take(8).try_into().unwrap())),
                5 => Field::Fixed32(u32::from_le_bytes(take(4).try_into().unwrap())),
                2 => {
                    let length = varint(&mut bytes) as usize;
                    let (head, rest) = bytes.split_at(length);
                    bytes = rest;
                    Field::Bytes(head.to_vec())
                }
                0 => Field::Varint(varint(&mut bytes)),
                other => panic!("wire type {other}"),
            };
            found.push((key >> 3, field));
        }
        found
    }

    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            assert_eq!(masked_crc(&bytes[..8]).to_le_bytes(), bytes[8..12]);
            let data = &bytes[12..12 + length];
            assert_eq!(
                masked_crc(data).to_le_bytes(),
                bytes[12 + length..16 + length]
            );
            found.push(data.to_vec());
            bytes = &bytes[16 + length..];
        }
        found
    }

    #[test]
    fn the_checksum_is_crc_32c() {
        // The check value of the algorithm's definition, and 32 zero bytes of RFC 3720, B.4.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn what_was_appended_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = Events::create(&folder.path().join("tensorboard")).unwrap();
        events
            .append(1, &[("reward", 0.25), ("pass rate", 0.5)])
            .unwrap();
        events.append(300, &[("reward", 0.75)]).unwrap();
        let found = records(&std::fs::read(&events.path).unwrap());
        assert_eq!(found.len(), 3);
        assert!(found[0].ends_with(b"brain.Event:2"));
        let mut read = Vec::new();
        for event in &found[1..] {
            let fields = fields(event);
            let [
                (1, Field::Fixed64(wall)),
                (2, Field::Varint(step)),
                (5, Field::Bytes(summary)),
            ] = &fields[..]
            else {
                panic!("{fields:?}")
            };
            assert!(f64::from_bits(*wall) > 1.7e9);
            for (number, value) in self::fields(summary) {
                let Field::Bytes(value) = value else {
                    panic!("{value:?}")
                };
                let value = self::fields(&value);
                let [(1, Field::Bytes(tag)), (2, Field::Fixed32(bits))] = &value[..] else {
                    panic!("{value:?}")
                };
                assert_eq!(number, 1);
                read.push((
                    *step,
                    String::from_utf8(tag.clone()).unwrap(),
                    f32::from_bits(*bits),
                ));
            }
        }
        let expected = [
            (1, "reward", 0.25),
            (1, "pass rate", 0.5),
            (300, "reward", 0.75),
        ];
        assert_eq!(
            read,
            expected.map(|(step, tag, value)| (step, tag.to_owned(), value))
        );
    }
}
