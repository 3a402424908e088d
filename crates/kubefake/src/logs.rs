//! What containers wrote, and `kubectl logs`.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::Response;
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use crate::{
    core::at,
    error::ApiError,
    kubelet::Kubelet,
    request::Query,
    server::{Body, streamed},
    validate::{list, text},
};

/// As the kubelet's default: older output goes.
const BYTES_MAX: usize = 10 << 20;

/// The output of one run of a container, both streams in order of arrival.
#[derive(Debug)]
pub(crate) struct Log {
    inner: Mutex<Inner>,
    /// Bytes so far; `u64::MAX` when it is complete.
    changed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Inner {
    pieces: VecDeque<(SystemTime, Bytes)>,
    /// Bytes that went.
    dropped: u64,
    kept: usize,
    ended: bool,
}

impl Log {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            inner: Mutex::default(),
            changed: watch::channel(0).0,
        })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, bytes: Bytes) {
        let total = {
            let mut inner = self.inner();
            inner.kept += bytes.len();
            inner.pieces.push_back((SystemTime::now(), bytes));
            while inner.kept > BYTES_MAX {
                let Some((_, old)) = inner.pieces.pop_front() else {
                    break;
                };
                inner.kept -= old.len();
                inner.dropped += old.len() as u64;
            }
            inner.dropped + inner.kept as u64
        };
        self.changed.send_replace(total);
    }

    pub(crate) fn end(&self) {
        self.inner().ended = true;
        self.changed.send_replace(u64::MAX);
    }

    /// What is there after a position: time and bytes of each piece, the next position, and
    /// whether there will be more.
    fn after(&self, position: u64) -> (Vec<(SystemTime, Bytes)>, u64, bool) {
        let inner = self.inner();
        let mut start = inner.dropped;
        let mut found = Vec::new();
        for (time, piece) in &inner.pieces {
            let end = start + piece.len() as u64;
            if end > position {
                let skip = usize::try_from(position.saturating_sub(start)).unwrap_or(0);
                found.push((*time, piece.slice(skip..)));
            }
            start = end;
        }
        (found, start, !inner.ended)
    }

    /// All lines, each with its time and its end, and the position after them.
    fn lines(&self) -> (Vec<(SystemTime, Vec<u8>)>, u64) {
        let (pieces, position, _) = self.after(0);
        let mut lines: Vec<(SystemTime, Vec<u8>)> = Vec::new();
        for (time, piece) in pieces {
            for part in piece.split_inclusive(|byte| *byte == b'\n') {
                match lines.last_mut() {
                    Some((_, last)) if last.last() != Some(&b'\n') => last.extend_from_slice(part),
                    _ => lines.push((time, part.to_vec())),
                }
            }
        }
        (lines, position)
    }

    /// The last bytes, as text.
    pub(crate) fn tail(&self, bytes_max: usize, lines_max: usize) -> String {
        let (lines, _) = self.lines();
        let from = lines.len().saturating_sub(lines_max);
        let tail = lines.get(from..).unwrap_or_default();
        let all: Vec<u8> = tail.iter().flat_map(|(_, line)| line.clone()).collect();
        let from = all.len().saturating_sub(bytes_max);
        String::from_utf8_lossy(all.get(from..).unwrap_or_default()).into_owned()
    }
}

/// The container that a request means.
pub(crate) fn container_of(pod: &Value, asked: Option<&str>) -> Result<String, ApiError> {
    let spec = &pod["spec"];
    let name = text(&pod["metadata"]["name"]);
    let all = || list(&spec["initContainers"]).chain(list(&spec["containers"]));
    if let Some(asked) = asked {
        return if all().any(|c| c["name"] == asked) {
            Ok(asked.to_owned())
        } else {
            Err(ApiError::bad_request(format!(
                "container {asked} is not valid for pod {name}"
            )))
        };
    }
    let containers: Vec<&str> = list(&spec["containers"])
        .map(|c| text(&c["name"]))
        .collect();
    match containers.as_slice() {
        [one] => Ok((*one).to_owned()),
        many => Err(ApiError::bad_request(format!(
            "a container name must be specified for pod {name}, choose one of: [{}]",
            many.join(" ")
        ))),
    }
}

/// The state of a container, as its pod has it.
pub(crate) fn status_of<'a>(pod: &'a Value, container: &str) -> Option<&'a Value> {
    let status = &pod["status"];
    list(&status["initContainerStatuses"])
        .chain(list(&status["containerStatuses"]))
        .find(|s| s["name"] == container)
}

/// Answers a request for a log.
pub(crate) async fn answer(
    kubelet: &Arc<Kubelet>,
    pod: &Value,
    query: &Query,
    tasks: &TaskTracker,
) -> Result<Response<Body>, ApiError> {
    let container = container_of(pod, query.get("container"))?;
    let name = text(&pod["metadata"]["name"]);
    kubelet.reachable(pod)?;
    let previous = query.flag("previous");
    let uid = text(&pod["metadata"]["uid"]);
    let Some(log) = kubelet.log(uid, &container, previous) else {
        let status = status_of(pod, &container);
        let why = status.map_or("ContainerCreating", |s| {
            match text(&s["state"]["waiting"]["reason"]) {
                "" => "ContainerCreating",
                reason => reason,
            }
        });
        let message = if previous {
            format!("previous terminated container \"{container}\" in pod \"{name}\" not found")
        } else if matches!(
            why,
            "ErrImagePull" | "ImagePullBackOff" | "ErrImageNeverPull"
        ) {
            format!(
                "container \"{container}\" in pod \"{name}\" is waiting to start: trying and failing to pull image"
            )
        } else {
            format!("container \"{container}\" in pod \"{name}\" is waiting to start: {why}")
        };
        return Err(ApiError::bad_request(message));
    };
    let since = query.number("sinceSeconds").map(|s| {
        let back = Duration::from_secs(s);
        SystemTime::now()
            .checked_sub(back)
            .unwrap_or(SystemTime::UNIX_EPOCH)
    });
    let stamps = query.flag("timestamps");
    let follow = query.flag("follow");
    let mut left = query.number("limitBytes").unwrap_or(u64::MAX);
    let (mut lines, mut position) = log.lines();
    if let Some(since) = since {
        lines.retain(|(time, _)| *time >= since);
    }
    if let Some(tail) = query.number("tailLines") {
        let keep = usize::try_from(tail).unwrap_or(usize::MAX);
        lines.drain(..lines.len().saturating_sub(keep));
    }
    let mut text: Vec<u8> = Vec::new();
    for (time, line) in lines {
        if stamps {
            text.extend_from_slice(format!("{} ", at(time)).as_bytes());
        }
        text.extend_from_slice(&line);
    }
    let (sender, chunks) = tokio::sync::mpsc::channel(16);
    tasks.spawn(async move {
        let mut changed = log.changed.subscribe();
        let mut chunk = Bytes::from(text);
        loop {
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(chunk.len());
            left -= most as u64;
            if most > 0 && sender.send(Ok(chunk.slice(..most))).await.is_err() {
                return;
            }
            if !follow || left == 0 {
                return;
            }
            changed.borrow_and_update();
            let (pieces, next, more) = log.after(position);
            position = next;
            if pieces.is_empty() {
                if !more {
                    return;
                }
                tokio::select! {
                    news = changed.changed() => if news.is_err() { return },
                    () = sender.closed() => return,
                }
            }
            let mut all = Vec::new();
            for (time, piece) in pieces {
                if stamps {
                    all.extend_from_slice(format!("{} ", at(time)).as_bytes());
                }
                all.extend_from_slice(&piece);
            }
            chunk = Bytes::from(all);
        }
    });
    Ok(streamed("text/plain", chunks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_whole_though_they_came_in_pieces() {
        let log = Log::new();
        for piece in ["a", "b\nc", "\n", "d"] {
            log.add(Bytes::from(piece));
        }
        let lines: Vec<Vec<u8>> = log.lines().0.into_iter().map(|(_, l)| l).collect();
        assert_eq!(lines, [b"ab\n".to_vec(), b"c\n".to_vec(), b"d".to_vec()]);
        assert_eq!(log.tail(100, 2), "c\nd");
        assert_eq!(log.tail(2, 100), "\nd");
        let (pieces, next, more) = log.after(2);
        assert_eq!(pieces.iter().map(|(_, p)| p.len()).sum::<usize>(), 4);
        assert_eq!((next, more), (6, true));
        log.end();
        assert!(!log.after(0).2);
    }

    #[test]
    fn old_output_goes() {
        let log = Log::new();
        for _ in 0..3 {
            log.add(Bytes::from(vec![b'x'; BYTES_MAX / 2]));
        }
        let (pieces, next, _) = log.after(0);
        assert_eq!(pieces.len(), 2);
        assert_eq!(next, (BYTES_MAX / 2 * 3) as u64);
    }
}
