//! Server-sent events: frames, and text in deltas.

use serde_json::Value;

/// One complete frame, with the event's name when the dialect has names.
pub(crate) fn frame(event: Option<&str>, data: &Value) -> String {
    match event {
        Some(event) => format!("event: {event}\ndata: {data}\n\n"),
        None => format!("data: {data}\n\n"),
    }
}

/// Cuts a text into deltas of at most `chars_max` characters. An empty text gives none.
pub(crate) fn deltas(text: &str, chars_max: usize) -> Vec<&str> {
    let mut deltas = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let at = rest
            .char_indices()
            .nth(chars_max.max(1))
            .map_or(rest.len(), |(at, _)| at);
        let (delta, behind) = rest.split_at(at);
        deltas.push(delta);
        rest = behind;
    }
    deltas
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Name and data of each event of a stream, by the rules of server-sent events.
    pub(crate) fn events(stream: &str) -> Vec<(Option<String>, String)> {
        let mut events = Vec::new();
        let (mut name, mut data): (Option<String>, Option<String>) = (None, None);
        for line in stream.split('\n') {
            if line.is_empty() {
                let name = name.take();
                events.extend(data.take().map(|data| (name, data)));
            } else if let Some(text) = line.strip_prefix("data:") {
                let text = text.strip_prefix(' ').unwrap_or(text);
                match &mut data {
                    Some(data) => data.extend(["\n", text]),
                    None => data = Some(text.to_owned()),
                }
            } else if let Some(text) = line.strip_prefix("event:") {
                name = Some(text.trim_start().to_owned());
            } else {
                assert!(
                    line.starts_with(':'),
                    "not a line of an event stream: {line:?}"
                );
            }
        }
        assert_eq!(data, None, "the last event is not closed");
        events
    }

    #[test]
    fn deltas_put_together_are_the_text() {
        for (text, chars_max, count) in [("", 3, 0), ("äöü", 2, 2), ("abc", 0, 3), ("a", 9, 1)] {
            let deltas = deltas(text, chars_max);
            assert_eq!((deltas.concat().as_str(), deltas.len()), (text, count));
        }
    }
}
