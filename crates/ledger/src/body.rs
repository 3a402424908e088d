//! A call as bytes: what is new in it, against an earlier call of the same rollout.
//!
//! Requests repeat the whole history, so almost everything of a call is in its parent. Three parts
//! are stored as changes: `request`, `conversation` (both JSON) and the prompt ids, whose base is
//! the parent's prompt *and output*. A change is `(head, tail, middle)`: so many bytes from the
//! beginning of the base, the middle, so many bytes from its end. Everything else is whole.
//!
//! ```text
//! u8        0: a zstd frame; 1: a zstd frame whose prefix is the middle of the parent (below)
//! 5 × u32   request head, tail; conversation head, tail; prompt head
//! frame of  u32 length, bytes                     middle of the request
//!           u32 length, bytes                     middle of the conversation
//!           u32 count, u32 × count                end of the prompt ids
//!           u32 length, JSON of all other fields
//!           u32 count, u32 × count                generated ids
//!           u32 count, f32 × count                log-probabilities, model
//!           u32 count, f32 × count                log-probabilities, sampled
//! ```
//!
//! all little-endian. When a client changes its history in several places, the middle is long;
//! then what lies at the same place of the parent is the prefix of the frame, and the
//! compressor finds what is the same.

use std::cell::RefCell;

use zstd::zstd_safe::{self, CCtx, CParameter, DCtx, ResetDirective};

use crate::source::{Difference, Source};

/// Largest body after decompression, in bytes: what a damaged length cannot exceed.
pub(crate) const BODY_BYTES_MAX: usize = 1 << 30;

/// A middle longer than this is compressed against the parent's.
const MIDDLE_BYTES_MIN: usize = 16 << 10;

/// A prefix shorter than this is not worth a context of its own.
const PREFIX_BYTES_MIN: usize = 1 << 10;

const LEVEL: i32 = 1;

/// Window of frames with a prefix: covers the longest middle that is worth it.
const WINDOW_LOG: u32 = 27;

/// A call in parts, as it is read.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Parts {
    pub(crate) request: Vec<u8>,
    pub(crate) conversation: Vec<u8>,
    pub(crate) prompt: Vec<u32>,
    pub(crate) output: Vec<u32>,
    pub(crate) rest: Vec<u8>,
    pub(crate) logprobs_model: Vec<f32>,
    pub(crate) logprobs_sampled: Vec<f32>,
}

/// Items that both begin with; block by block, since almost always all are equal.
pub(crate) fn common<T: PartialEq>(left: &[T], right: &[T]) -> usize {
    const BLOCK: usize = 128;
    let length = left.len().min(right.len());
    let (left, right) = (&left[..length], &right[..length]);
    let blocks = left
        .chunks_exact(BLOCK)
        .zip(right.chunks_exact(BLOCK))
        .take_while(|(a, b)| a == b)
        .count();
    let done = blocks * BLOCK;
    done + left[done..]
        .iter()
        .zip(&right[done..])
        .take_while(|(a, b)| a == b)
        .count()
}

/// Items that both end with.
pub(crate) fn common_end(left: &[u8], right: &[u8]) -> usize {
    const BLOCK: usize = 128;
    let length = left.len().min(right.len());
    let (left, right) = (&left[left.len() - length..], &right[right.len() - length..]);
    let blocks = left
        .rchunks_exact(BLOCK)
        .zip(right.rchunks_exact(BLOCK))
        .take_while(|(a, b)| a == b)
        .count();
    let done = blocks * BLOCK;
    let more = left[..length - done]
        .iter()
        .rev()
        .zip(right[..length - done].iter().rev())
        .take_while(|(a, b)| a == b)
        .count();
    done + more
}

fn words<T: Copy>(values: &[T], bytes: fn(T) -> [u8; 4], out: &mut Vec<u8>) {
    for &value in values {
        out.extend_from_slice(&bytes(value));
    }
}

/// A change in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Change {
    pub(crate) head: usize,
    pub(crate) tail: usize,
}

impl Change {
    /// What lies between head and tail; `None` when they do not fit.
    pub(crate) fn middle(self, whole: &[u8]) -> Option<&[u8]> {
        let end = whole.len().checked_sub(self.tail)?;
        whole.get(self.head..end)
    }

    pub(crate) fn apply(self, base: &[u8], middle: &[u8]) -> Result<Vec<u8>, String> {
        self.middle(base).ok_or("it does not fit its parent")?;
        let tail = &base[base.len() - self.tail..];
        Ok([&base[..self.head], middle, tail].concat())
    }
}

/// Where a call differs from its parent.
#[derive(Debug, Clone, Copy, Default)]
struct Changes {
    request: Change,
    conversation: Change,
    /// Tokens.
    prompt: usize,
}

impl Changes {
    fn write(self, out: &mut Vec<u8>) -> Result<(), String> {
        for count in [
            self.request.head,
            self.request.tail,
            self.conversation.head,
            self.conversation.tail,
            self.prompt,
        ] {
            out.extend_from_slice(&fits(count)?);
        }
        Ok(())
    }

    fn read(rest: &mut &[u8]) -> Result<Self, String> {
        let mut next = || take_u32(rest).map(|count| count as usize);
        let mut change = || -> Result<Change, String> {
            Ok(Change {
                head: next()?,
                tail: next()?,
            })
        };
        Ok(Self {
            request: change()?,
            conversation: change()?,
            prompt: next()?,
        })
    }

    /// What the parent has where the changes are.
    fn prefix(self, base: &Parts) -> Result<Vec<u8>, String> {
        let strange = || "it does not fit its parent".to_owned();
        let mut prefix = Vec::new();
        for (change, whole) in [
            (self.request, &base.request),
            (self.conversation, &base.conversation),
        ] {
            prefix.extend_from_slice(change.middle(whole).ok_or_else(strange)?);
        }
        let from = self.prompt.min(base.prompt.len());
        words(&base.prompt[from..], u32::to_le_bytes, &mut prefix);
        let from = (self.prompt - from).min(base.output.len());
        words(&base.output[from..], u32::to_le_bytes, &mut prefix);
        Ok(prefix)
    }
}

fn fits(count: usize) -> Result<[u8; 4], String> {
    u32::try_from(count)
        .map(u32::to_le_bytes)
        .map_err(|_| "longer than 4 GiB".to_owned())
}

/// Writes a call, against a parent if there is one; `difference` is between these two.
pub(crate) fn encode(
    own: &Source,
    difference: &Difference,
    parent: Option<&Source>,
) -> Result<Vec<u8>, String> {
    let own_tokens = own
        .prompt
        .get(difference.prompt..)
        .ok_or("it shares more tokens than it has")?;
    let mut plain = Vec::with_capacity(
        difference.request.own.len()
            + difference.conversation.own.len()
            + own.rest.len()
            + 4 * own_tokens.len()
            + 12 * own.output.len()
            + 64,
    );
    for middle in [&difference.request.own, &difference.conversation.own] {
        plain.extend_from_slice(&fits(middle.len())?);
        plain.extend_from_slice(middle);
    }
    plain.extend_from_slice(&fits(own_tokens.len())?);
    words(own_tokens, u32::to_le_bytes, &mut plain);
    let changed = plain.len();
    plain.extend_from_slice(&fits(own.rest.len())?);
    plain.extend_from_slice(&own.rest);
    plain.extend_from_slice(&fits(own.output.len())?);
    words(&own.output, u32::to_le_bytes, &mut plain);
    for values in [&own.logprobs_model, &own.logprobs_sampled] {
        plain.extend_from_slice(&fits(values.len())?);
        words(values, f32::to_le_bytes, &mut plain);
    }
    if plain.len() > BODY_BYTES_MAX {
        return Err("longer than 1 GiB".to_owned());
    }
    let prefix = match parent {
        Some(parent) if changed > MIDDLE_BYTES_MIN => prefix(difference, parent),
        _ => Vec::new(),
    };
    // A history that only grew leaves nothing to look into.
    let prefixed = prefix.len() > PREFIX_BYTES_MIN;
    let mut body = vec![u8::from(prefixed)];
    Changes {
        request: difference.request.change,
        conversation: difference.conversation.change,
        prompt: difference.prompt,
    }
    .write(&mut body)?;
    if prefixed {
        compress_after(&plain, &prefix, &mut body)?;
    } else {
        compress(&plain, &mut body)?;
    }
    Ok(body)
}

/// [`Changes::prefix`], of a parent that was not read but is still held.
fn prefix(difference: &Difference, parent: &Source) -> Vec<u8> {
    let mut prefix = [&difference.request.base[..], &difference.conversation.base].concat();
    let from = difference.prompt.min(parent.prompt.len());
    words(&parent.prompt[from..], u32::to_le_bytes, &mut prefix);
    let from = (difference.prompt - from).min(parent.output.len());
    words(&parent.output[from..], u32::to_le_bytes, &mut prefix);
    prefix
}

fn code(found: usize) -> String {
    format!("zstd: {}", zstd_safe::get_error_name(found))
}

fn compress(plain: &[u8], body: &mut Vec<u8>) -> Result<(), String> {
    thread_local! {
        // A context costs more to make than a small body to compress.
        static CONTEXT: RefCell<CCtx<'static>> = RefCell::new(CCtx::create());
    }
    CONTEXT.with_borrow_mut(|context| {
        context
            .reset(ResetDirective::SessionAndParameters)
            .and_then(|_| context.set_parameter(CParameter::CompressionLevel(LEVEL)))
            .map_err(code)?;
        frame(context, plain, body)
    })
}

fn compress_after(plain: &[u8], prefix: &[u8], body: &mut Vec<u8>) -> Result<(), String> {
    let mut context = CCtx::create();
    for parameter in [
        CParameter::CompressionLevel(LEVEL),
        CParameter::WindowLog(WINDOW_LOG),
        CParameter::EnableLongDistanceMatching(true),
    ] {
        context.set_parameter(parameter).map_err(code)?;
    }
    context.ref_prefix(prefix).map_err(code)?;
    frame(&mut context, plain, body)
}

fn frame(context: &mut CCtx<'_>, plain: &[u8], body: &mut Vec<u8>) -> Result<(), String> {
    let start = body.len();
    body.resize(start + zstd_safe::compress_bound(plain.len()), 0);
    let length = context.compress2(&mut body[start..], plain).map_err(code)?;
    body.truncate(start + length);
    body.shrink_to_fit();
    Ok(())
}

/// Reads a call. `parent` must be what [`encode`] was given. The checksum was right, so an error
/// here means that the bytes are what was written, but not what this program writes.
pub(crate) fn decode(body: &[u8], parent: Option<&Parts>) -> Result<Parts, String> {
    let none = Parts::default();
    let base = parent.unwrap_or(&none);
    let (&kind, mut rest) = body.split_first().ok_or("it is empty")?;
    let changes = Changes::read(&mut rest)?;
    let prefix = match kind {
        0 => None,
        1 => Some(changes.prefix(base)?),
        other => return Err(format!("expected kind 0 or 1, found {other}")),
    };
    let mut plain = vec![0; decompressed_len(rest)?];
    let mut context = DCtx::create();
    if let Some(prefix) = &prefix {
        context.ref_prefix(prefix).map_err(code)?;
    }
    let length = context.decompress(&mut plain[..], rest).map_err(code)?;
    plain.truncate(length);
    let mut rest = plain.as_slice();
    let middle = take_bytes(&mut rest)?;
    let request = changes.request.apply(&base.request, middle)?;
    let middle = take_bytes(&mut rest)?;
    let conversation = changes.conversation.apply(&base.conversation, middle)?;
    let own = take_words(&mut rest, u32::from_le_bytes)?;
    if changes.prompt > base.prompt.len() + base.output.len() {
        return Err("it does not fit its parent".to_owned());
    }
    let of_prompt = changes.prompt.min(base.prompt.len());
    let of_output = changes.prompt - of_prompt;
    let prompt = [&base.prompt[..of_prompt], &base.output[..of_output], &own].concat();
    let parts = Parts {
        request,
        conversation,
        prompt,
        rest: take_bytes(&mut rest)?.to_vec(),
        output: take_words(&mut rest, u32::from_le_bytes)?,
        logprobs_model: take_words(&mut rest, f32::from_le_bytes)?,
        logprobs_sampled: take_words(&mut rest, f32::from_le_bytes)?,
    };
    if rest.is_empty() {
        Ok(parts)
    } else {
        Err(format!("{} bytes too many", rest.len()))
    }
}

/// The size that a frame says it has, if that is believable.
pub(crate) fn decompressed_len(frame: &[u8]) -> Result<usize, String> {
    match zstd_safe::get_frame_content_size(frame) {
        Ok(Some(len)) if len <= BODY_BYTES_MAX as u64 => {
            usize::try_from(len).map_err(|found| found.to_string())
        }
        other => Err(format!("zstd frame says its size is {other:?}")),
    }
}

pub(crate) fn take<'a>(rest: &mut &'a [u8], len: usize) -> Result<&'a [u8], String> {
    match rest.split_at_checked(len) {
        Some((head, tail)) => {
            *rest = tail;
            Ok(head)
        }
        None => Err(format!("expected {len} more bytes, found {}", rest.len())),
    }
}

pub(crate) fn take_u32(rest: &mut &[u8]) -> Result<u32, String> {
    let bytes = take(rest, 4)?;
    bytes
        .try_into()
        .map(u32::from_le_bytes)
        .map_err(|_| "expected 4 bytes".to_owned())
}

pub(crate) fn take_bytes<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8], String> {
    let length = take_u32(rest)? as usize;
    take(rest, length)
}

pub(crate) fn take_words<T>(rest: &mut &[u8], word: fn([u8; 4]) -> T) -> Result<Vec<T>, String> {
    let count = take_u32(rest)? as usize;
    let bytes = take(rest, count.saturating_mul(4))?;
    Ok(bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|chunk| word(*chunk))
        .collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use record::{
        Call, CallId, Continuation, Conversation, Dialect, FinishReason, Generation, Message, Role,
        RolloutId, Sampling,
    };
    use serde_json::{Value, json};

    use super::{Parts, decode, encode};
    use crate::source::Source;

    fn call(request: Value, texts: &[String], prompt: Vec<u32>, output: Vec<u32>) -> Call {
        Call {
            id: CallId {
                rollout: RolloutId::new("r").unwrap(),
                index: 0,
            },
            dialect: Dialect::Chat,
            request,
            headers: Vec::new(),
            digest: String::new(),
            conversation: Conversation {
                messages: texts
                    .iter()
                    .map(|text| Message::text(Role::User, text.clone()))
                    .collect(),
                tools: Vec::new(),
            },
            prompt_ids: prompt,
            continuation: Continuation::default(),
            sampling: Sampling::default(),
            generation: Some(Generation {
                logprobs_model: output.iter().map(|id| -(*id as f32)).collect(),
                logprobs_sampled: Vec::new(),
                token_ids: output,
                policy: Vec::new(),
                finish: FinishReason::Stop,
                cached_tokens: 0,
            }),
            raw_text: String::new(),
            reply: None,
            parse_failed: false,
            attempts: Vec::new(),
        }
    }

    /// What reading must give.
    fn parts(call: &Call) -> Parts {
        let source = Source::of(call.clone()).unwrap();
        Parts {
            request: serde_json::to_vec(&call.request).unwrap(),
            conversation: serde_json::to_vec(&call.conversation).unwrap(),
            prompt: source.prompt,
            output: source.output,
            rest: source.rest,
            logprobs_model: source.logprobs_model,
            logprobs_sampled: source.logprobs_sampled,
        }
    }

    /// The body of `own` against `parent`.
    fn written(own: &Call, parent: Option<&Call>) -> Vec<u8> {
        let parent = parent.map(|parent| {
            let parent = Source::of(parent.clone()).unwrap();
            let difference = parent.against(None).unwrap();
            parent.compared(difference)
        });
        let own = Source::of(own.clone()).unwrap();
        let difference = own.against(parent.as_ref()).unwrap();
        encode(&own, &difference, parent.as_ref()).unwrap()
    }

    fn calls() -> impl Strategy<Value = Call> {
        let texts = || prop::collection::vec("[ab\"]{0,9}", 0..6);
        let tokens = || prop::collection::vec(0_u32..3, 0..20);
        (texts(), texts(), tokens(), tokens()).prop_map(|(request, texts, prompt, output)| {
            call(json!({"m": request, "n": 1}), &texts, prompt, output)
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(parent in prop::option::of(calls()), own in calls()) {
            let body = written(&own, parent.as_ref());
            let parent = parent.as_ref().map(parts);
            prop_assert_eq!(decode(&body, parent.as_ref()), Ok(parts(&own)));
        }

        #[test]
        fn damaged_bodies_are_refused_or_read_but_never_panic(
            parent in prop::option::of(calls()),
            own in calls(),
            at in any::<prop::sample::Index>(),
            bit in 0_u8..8,
        ) {
            let mut body = written(&own, parent.as_ref());
            let at = at.index(body.len());
            body[at] ^= 1 << bit;
            let _ = decode(&body, parent.as_ref().map(parts).as_ref());
        }
    }

    /// A text that no compressor shortens by more than a quarter.
    fn noise(seed: u64, len: usize) -> String {
        use rand::{Rng, SeedableRng};
        let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
        (0..len)
            .map(|_| char::from(random.random_range(b'#'..b'\\')))
            .collect()
    }

    #[test]
    fn a_history_changed_in_several_places_costs_what_changed() {
        let texts: Vec<String> = (0..10).map(|seed| noise(seed, 30_000)).collect();
        let request = |texts: &[String]| json!({"messages": texts});
        let base = call(request(&texts), &texts, Vec::new(), Vec::new());
        let mut other = texts.clone();
        // A header that changes with every request, and a mark that wanders.
        for at in [0, 5, 9] {
            other[at].replace_range(10..11, " ");
        }
        other.push(noise(99, 1000));
        let own = call(request(&other), &other, Vec::new(), Vec::new());
        let body = written(&own, Some(&base));
        assert!(body.len() < 3000, "{}", body.len());
        assert_eq!(decode(&body, Some(&parts(&base))), Ok(parts(&own)));
        assert!(decode(&body, None).is_err());
    }
}
