//! GGUF files in: Llama and Qwen shapes, dequantised to f32.
//!
//! The file is one little-endian stream: magic, version, counts, metadata (typed values by key),
//! tensor infos (name, dimensions with the fastest first, type, offset), padding, data. Only what
//! inference needs is read; [`load_text`] reads the tokenizer.
//!
//! Types: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. Others are refused by number. Files of
//! architecture `llama` hold query and key rows permuted for interleaved rotary pairs; they are
//! put back into Hugging Face's order.
//!
//! Limits: a file may announce at most 65,536 tensors and as many keys, strings of 16 MiB and
//! arrays of 16 million entries nested once; beyond, it is refused.

use std::{collections::HashMap, path::Path};

use crate::{
    config::{Config, Family},
    files::ModelError,
    weights::{Layout, Weights},
};

mod text;

pub use text::{Text, load_text};

const MAGIC: &[u8] = b"GGUF";
const ITEMS_MAX: u64 = 65_536;
const STRING_MAX: u64 = 16 << 20;
const ARRAY_MAX: u64 = 16 << 20;
/// Numbers per block of the quantised types.
const BLOCK: usize = 32;

/// From the bytes of a tensor to its numbers.
type Decode = fn(&[u8], &mut [f32]);

/// IEEE half precision to single, exactly.
#[must_use]
pub fn half_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits >> 15) << 31;
    let (exponent, fraction) = (u32::from(bits >> 10 & 0x1f), u32::from(bits & 0x3ff));
    match exponent {
        // Subnormal: the fraction counts units of 2^-24.
        0 => {
            let magnitude = fraction as f32 * 2.0_f32.powi(-24);
            if sign == 0 { magnitude } else { -magnitude }
        }
        31 => f32::from_bits(sign | 0x7f80_0000 | fraction << 13),
        _ => f32::from_bits(sign | (exponent + 112) << 23 | fraction << 13),
    }
}

/// A metadata value that matters here.
#[derive(Debug, Clone, PartialEq)]
enum Value {
    Number(f64),
    Text(String),
    List(Vec<Self>),
}

/// Reads forward through the bytes; every read says what it wanted.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize, what: &str) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(count);
        let part = end.and_then(|end| self.bytes.get(self.at..end));
        let part = part.ok_or_else(|| {
            format!(
                "expected {count} bytes of {what} at byte {}, the file has {}",
                self.at,
                self.bytes.len()
            )
        })?;
        self.at += count;
        Ok(part)
    }

    fn unsigned(&mut self, width: usize, what: &str) -> Result<u64, String> {
        let bytes = self.take(width, what)?;
        Ok(bytes
            .iter()
            .rev()
            .fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    fn count(&mut self, limit: u64, what: &str) -> Result<usize, String> {
        let count = self.unsigned(8, what)?;
        if count > limit {
            return Err(format!("{what}: expected at most {limit}, found {count}"));
        }
        Ok(count as usize)
    }

    fn text(&mut self, what: &str) -> Result<String, String> {
        let length = self.count(STRING_MAX, what)?;
        let bytes = self.take(length, what)?;
        String::from_utf8(bytes.to_vec()).map_err(|error| format!("{what}: {error}"))
    }

    fn value(&mut self, kind: u64, nested: bool) -> Result<Value, String> {
        let what = "a metadata value";
        let signed = |value: u64, bits: u32| ((value << (64 - bits)) as i64 >> (64 - bits)) as f64;
        Ok(match kind {
            0 | 7 => Value::Number(self.unsigned(1, what)? as f64),
            1 => Value::Number(signed(self.unsigned(1, what)?, 8)),
            2 => Value::Number(self.unsigned(2, what)? as f64),
            3 => Value::Number(signed(self.unsigned(2, what)?, 16)),
            4 => Value::Number(self.unsigned(4, what)? as f64),
            5 => Value::Number(signed(self.unsigned(4, what)?, 32)),
            6 => Value::Number(f64::from(f32::from_bits(self.unsigned(4, what)? as u32))),
            8 => Value::Text(self.text(what)?),
            9 if !nested => {
                let kind = self.unsigned(4, what)?;
                let count = self.count(ARRAY_MAX, "an array")?;
                let values = (0..count).map(|_| self.value(kind, true));
                Value::List(values.collect::<Result<_, _>>()?)
            }
            10 => Value::Number(self.unsigned(8, what)? as f64),
            11 => Value::Number(signed(self.unsigned(8, what)?, 64)),
            12 => Value::Number(f64::from_bits(self.unsigned(8, what)?)),
            other => return Err(format!("unknown metadata type {other}")),
        })
    }
}

/// A tensor's place in the file.
#[derive(Debug)]
struct Info {
    /// Fastest dimension first, as the file has it.
    dimensions: Vec<usize>,
    kind: u64,
    offset: usize,
}

/// The metadata and tensors of a file.
struct File<'a> {
    bytes: &'a [u8],
    values: HashMap<String, Value>,
    tensors: HashMap<String, Info>,
    data: usize,
}

impl<'a> File<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self, String> {
        let mut cursor = Cursor { bytes, at: 0 };
        if cursor.take(4, "the magic")? != MAGIC {
            return Err("expected a file that begins with GGUF".into());
        }
        let version = cursor.unsigned(4, "the version")?;
        if !(2..=3).contains(&version) {
            return Err(format!("expected GGUF version 2 or 3, found {version}"));
        }
        let tensor_count = cursor.count(ITEMS_MAX, "the number of tensors")?;
        let value_count = cursor.count(ITEMS_MAX, "the number of keys")?;
        let mut values = HashMap::new();
        for _ in 0..value_count {
            let key = cursor.text("a key")?;
            let kind = cursor.unsigned(4, "a metadata type")?;
            values.insert(key, cursor.value(kind, false)?);
        }
        let mut tensors = HashMap::new();
        for _ in 0..tensor_count {
            let name = cursor.text("a tensor's name")?;
            let rank = cursor.unsigned(4, "a tensor's rank")?;
            if rank > 4 {
                return Err(format!(
                    "tensor {name}: expected at most 4 dimensions, found {rank}"
                ));
            }
            let dimensions = (0..rank)
                .map(|_| cursor.count(1 << 40, "a dimension"))
                .collect::<Result<_, _>>()?;
            let kind = cursor.unsigned(4, "a tensor's type")?;
            let offset = cursor.count(1 << 48, "a tensor's offset")?;
            let info = Info {
                dimensions,
                kind,
                offset,
            };
            tensors.insert(name, info);
        }
        let alignment = match values.get("general.alignment") {
            Some(Value::Number(value)) if *value >= 1.0 => *value as usize,
            _ => 32,
        };
        Ok(Self {
            bytes,
            values,
            tensors,
            data: cursor.at.next_multiple_of(alignment),
        })
    }

    fn number(&self, key: &str) -> Option<f64> {
        match self.values.get(key) {
            Some(Value::Number(value)) => Some(*value),
            _ => None,
        }
    }

    fn config(&self) -> Result<Config, String> {
        let architecture = match self.values.get("general.architecture") {
            Some(Value::Text(name)) => name.as_str(),
            _ => "",
        };
        let model_type = match architecture {
            "llama" => Family::Llama,
            "qwen2" => Family::Qwen2,
            "qwen3" => Family::Qwen3,
            other => {
                return Err(format!(
                    "general.architecture: expected llama, qwen2 or qwen3, found {other:?}"
                ));
            }
        };
        let own = |key: &str| self.number(&format!("{architecture}.{key}"));
        let need = |key: &str| {
            own(key)
                .map(|value| value as usize)
                .ok_or_else(|| format!("{architecture}.{key} is missing"))
        };
        if let Some(Value::Text(kind)) = self
            .values
            .get(&format!("{architecture}.rope.scaling.type"))
            && kind != "none"
        {
            return Err(format!("rope.scaling.type: expected none, found {kind}"));
        }
        let heads = need("attention.head_count")?;
        let embedding = self
            .tensors
            .get("token_embd.weight")
            .and_then(|info| info.dimensions.get(1).copied())
            .ok_or("tensor token_embd.weight is missing")?;
        Config {
            model_type,
            vocab_size: embedding,
            hidden_size: need("embedding_length")?,
            intermediate_size: need("feed_forward_length")?,
            num_hidden_layers: need("block_count")?,
            num_attention_heads: heads,
            num_key_value_heads: own("attention.head_count_kv").map_or(heads, |v| v as usize),
            head_dim: own("attention.key_length").map_or(0, |v| v as usize),
            max_position_embeddings: need("context_length")?,
            rms_norm_eps: own("attention.layer_norm_rms_epsilon").unwrap_or(1e-6) as f32,
            rope_theta: own("rope.freq_base").unwrap_or(1e4) as f32,
            rope_scaling: None,
            tie_word_embeddings: !self.tensors.contains_key("output.weight"),
        }
        .validated()
    }

    /// The numbers of a tensor in file order.
    fn read(&self, name: &str, expected: &[usize]) -> Result<Vec<f32>, String> {
        let info = self
            .tensors
            .get(name)
            .ok_or_else(|| format!("tensor {name} is missing"))?;
        let shape: Vec<usize> = info.dimensions.iter().rev().copied().collect();
        if shape != expected {
            return Err(format!(
                "tensor {name}: expected shape {expected:?} from the metadata, found {shape:?}"
            ));
        }
        let count: usize = shape.iter().product();
        let blocks = count / BLOCK;
        let (size, decode) = match info.kind {
            0 => (4 * count, plain_f32 as Decode),
            1 => (2 * count, plain_f16 as Decode),
            30 => (2 * count, plain_bf16 as Decode),
            2 => (18 * blocks, q4_0 as Decode),
            3 => (20 * blocks, q4_1 as Decode),
            6 => (22 * blocks, q5_0 as Decode),
            7 => (24 * blocks, q5_1 as Decode),
            8 => (34 * blocks, q8_0 as Decode),
            other => {
                return Err(format!(
                    "tensor {name}: expected type F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0, found number {other}"
                ));
            }
        };
        if !matches!(info.kind, 0 | 1 | 30)
            && !shape.last().is_some_and(|w| w.is_multiple_of(BLOCK))
        {
            return Err(format!(
                "tensor {name}: expected rows of a multiple of {BLOCK} numbers, found {shape:?}"
            ));
        }
        let from = self.data + info.offset;
        let bytes = self.bytes.get(from..from + size).ok_or_else(|| {
            format!(
                "tensor {name}: expected {size} bytes at {from}, the file has {}",
                self.bytes.len()
            )
        })?;
        let mut values = vec![0.0; count];
        decode(bytes, &mut values);
        if values.iter().any(|value| !value.is_finite()) {
            return Err(format!("tensor {name} holds a value that is not finite"));
        }
        Ok(values)
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    half_to_f32(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

fn plain_f32(bytes: &[u8], out: &mut [f32]) {
    for (value, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
        *value = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    }
}

fn plain_f16(bytes: &[u8], out: &mut [f32]) {
    for (value, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        *value = half_at(b, 0);
    }
}

fn plain_bf16(bytes: &[u8], out: &mut [f32]) {
    for (value, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        *value = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
    }
}

/// Blocks of 32 four-bit numbers: the low halves of 16 bytes, then the high ones.
fn nibbles(packed: &[u8], out: &mut [f32], number: impl Fn(u8, usize) -> f32) {
    let half = BLOCK / 2;
    for (i, byte) in packed[..half].iter().enumerate() {
        out[i] = number(byte & 0xf, i);
        out[i + half] = number(byte >> 4, i + half);
    }
}

fn q4_0(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(18).zip(out.chunks_exact_mut(BLOCK)) {
        let d = half_at(block, 0);
        nibbles(&block[2..], out, |q, _| (f32::from(q) - 8.0) * d);
    }
}

fn q4_1(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(20).zip(out.chunks_exact_mut(BLOCK)) {
        let (d, m) = (half_at(block, 0), half_at(block, 2));
        nibbles(&block[4..], out, |q, _| f32::from(q) * d + m);
    }
}

/// The fifth bits of a block, one per number.
fn fifth(high: u32, q: u8, i: usize) -> f32 {
    f32::from(q | ((high >> i & 1) << 4) as u8)
}

fn q5_0(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(22).zip(out.chunks_exact_mut(BLOCK)) {
        let d = half_at(block, 0);
        let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
        nibbles(&block[6..], out, |q, i| (fifth(high, q, i) - 16.0) * d);
    }
}

fn q5_1(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(24).zip(out.chunks_exact_mut(BLOCK)) {
        let (d, m) = (half_at(block, 0), half_at(block, 2));
        let high = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
        nibbles(&block[8..], out, |q, i| fifth(high, q, i) * d + m);
    }
}

fn q8_0(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(34).zip(out.chunks_exact_mut(BLOCK)) {
        let d = half_at(block, 0);
        for (value, byte) in out.iter_mut().zip(&block[2..]) {
            *value = f32::from(*byte as i8) * d;
        }
    }
}

/// From pairs side by side to pairs half a head apart: row `2i + s` of a head goes to row
/// `i + s · half`.
fn unpermute(values: &[f32], head_dim: usize, width: usize) -> Vec<f32> {
    let mut out = vec![0.0; values.len()];
    let half = head_dim / 2;
    for (head_in, head_out) in values
        .chunks_exact(head_dim * width)
        .zip(out.chunks_exact_mut(head_dim * width))
    {
        for (row, line) in head_in.chunks_exact(width).enumerate() {
            let to = (row / 2 + row % 2 * half) * width;
            head_out[to..to + width].copy_from_slice(line);
        }
    }
    out
}

/// The name of one of our tensors in a GGUF file.
fn gguf_name(name: &str) -> Option<String> {
    let plain = match name {
        "model.embed_tokens.weight" => "token_embd.weight",
        "model.norm.weight" => "output_norm.weight",
        "lm_head.weight" => "output.weight",
        _ => "",
    };
    if !plain.is_empty() {
        return Some(plain.into());
    }
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (module, kind) = rest.rsplit_once('.')?;
    let module = match module {
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" => "ffn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        _ => return None,
    };
    Some(format!("blk.{layer}.{module}.{kind}"))
}

/// Reads a file, dequantised.
///
/// # Errors
/// [`ModelError::File`] and [`ModelError::Tensors`] naming the tensor or key.
pub fn load(path: &Path) -> Result<Weights, ModelError> {
    read_file(path, weights)
}

fn read_file<T>(
    path: &Path,
    of: impl FnOnce(&File<'_>) -> Result<T, String>,
) -> Result<T, ModelError> {
    let bytes = std::fs::read(path).map_err(|source| ModelError::File {
        path: path.to_owned(),
        source,
    })?;
    let found = File::parse(&bytes).and_then(|file| of(&file));
    found.map_err(|reason| ModelError::Tensors {
        path: path.to_owned(),
        reason,
    })
}

fn weights(file: &File<'_>) -> Result<Weights, String> {
    let config = file.config()?;
    let layout = Layout::new(&config);
    let mut data = vec![0.0; layout.len];
    for tensor in &layout.tensors {
        let name = gguf_name(&tensor.name)
            .ok_or_else(|| format!("tensor {} has no GGUF name", tensor.name))?;
        let mut values = file.read(&name, &tensor.shape)?;
        let turned = tensor.name.contains(".q_proj.") || tensor.name.contains(".k_proj.");
        if turned && config.model_type == Family::Llama {
            values = unpermute(&values, config.head_dim, config.hidden_size);
        }
        data[tensor.range.clone()].copy_from_slice(&values);
    }
    Ok(Weights {
        config,
        layout,
        data,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_exact() {
        for (bits, value) in [
            (0x0000, 0.0),
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
            (0x0001, 5.960_464_5e-8),
            (0x8400, -6.103_515_6e-5),
        ] {
            assert_eq!(half_to_f32(bits), value, "{bits:#x}");
        }
        assert!(half_to_f32(0x7e00).is_nan());
        assert_eq!(half_to_f32(0xfc00), f32::NEG_INFINITY);
    }

    #[test]
    fn quantised_blocks() {
        let mut out = [0.0; BLOCK];
        let packed: Vec<u8> = (0..16).map(|i| i | (15 - i) << 4).collect();
        let one = 0x3c00_u16.to_le_bytes();
        let two = 0x4000_u16.to_le_bytes();
        q4_1(&[&one[..], &two, &packed].concat(), &mut out);
        assert_eq!((out[0], out[3], out[16], out[31]), (2.0, 5.0, 17.0, 2.0));
        q4_0(&[&two[..], &packed].concat(), &mut out);
        assert_eq!((out[0], out[15], out[16]), (-16.0, 14.0, 14.0));
        let high = (1_u32 | 1 << 31).to_le_bytes();
        q5_0(&[&one[..], &high, &packed].concat(), &mut out);
        assert_eq!((out[0], out[1], out[31]), (0.0, -15.0, 0.0));
        q5_1(&[&one[..], &two, &high, &packed].concat(), &mut out);
        assert_eq!((out[0], out[1], out[31]), (18.0, 3.0, 18.0));
        let bytes: Vec<u8> = (0..32).map(|i| (i - 16) as i8 as u8).collect();
        q8_0(&[&two[..], &bytes].concat(), &mut out);
        assert_eq!((out[0], out[31]), (-32.0, 30.0));
    }

    #[test]
    fn broken_files_are_refused_with_a_reason() {
        for (bytes, part) in [
            (&b"GGU"[..], "the magic"),
            (b"GGML\x03\0\0\0", "begins with GGUF"),
            (b"GGUF\x09\0\0\0", "version 2 or 3"),
            (
                b"GGUF\x03\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff",
                "at most 65536",
            ),
        ] {
            let error = File::parse(bytes)
                .and_then(|file| weights(&file))
                .err()
                .unwrap();
            assert!(error.contains(part), "{error}");
        }
    }
}
