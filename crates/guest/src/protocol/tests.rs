//! The decoder against anything.

use proptest::prelude::*;

use super::*;

fn frames() -> impl Strategy<Value = Vec<Frame>> {
    let frame = (
        0..Kind::ALL.len(),
        any::<u32>(),
        prop::collection::vec(any::<u8>(), 0..300),
    )
        .prop_map(|(kind, id, body)| Frame::new(Kind::ALL[kind], id, body));
    prop::collection::vec(frame, 0..8)
}

proptest! {
    #[test]
    fn frames_survive_any_chunking(frames in frames(), sizes in prop::collection::vec(1_usize..40, 1..20)) {
        let bytes: Vec<u8> = frames.iter().flat_map(|f| f.encode().unwrap()).collect();
        let mut decoder = Decoder::default();
        let mut seen = Vec::new();
        let mut rest = bytes.as_slice();
        let mut sizes = sizes.iter().cycle();
        while !rest.is_empty() {
            let (chunk, after) = rest.split_at((*sizes.next().unwrap()).min(rest.len()));
            decoder.push(chunk);
            rest = after;
            while let Some(frame) = decoder.next_frame().unwrap() { seen.push(frame); }
        }
        prop_assert_eq!(seen, frames);
    }

    #[test]
    fn garbage_never_panics_and_never_grows(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let mut decoder = Decoder::default();
        for chunk in bytes.chunks(7) {
            decoder.push(chunk);
            loop {
                match decoder.next_frame() {
                    Ok(Some(frame)) => prop_assert!(frame.body.len() <= bytes.len()),
                    Ok(None) => break,
                    Err(_) => return Ok(()),
                }
            }
        }
    }

    #[test]
    fn messages_of_garbage_never_panic(body in prop::collection::vec(any::<u8>(), 0..200)) {
        let frame = Frame::new(Kind::Exec, 1, body.clone());
        prop_assert!(frame.parse::<ExecRequest>().is_err());
        if let Ok((number, path)) = decode_path(&body) {
            prop_assert_eq!(encode_path(number, path), body);
        }
    }
}

#[test]
fn limits_are_refused_before_the_body_arrives() {
    let mut decoder = Decoder::default();
    decoder.push(&((BODY_BYTES_MAX + 6) as u32).to_le_bytes());
    assert_eq!(
        decoder.next_frame(),
        Err(ProtocolError::Length {
            bytes: BODY_BYTES_MAX + 6
        })
    );
    let mut decoder = Decoder::default();
    decoder.push(&[200, 0, 0, 0, 33]);
    assert_eq!(decoder.next_frame(), Err(ProtocolError::UnknownKind(33)));
    let long = Frame::new(Kind::Stdin, 1, vec![0; BODY_BYTES_MAX + 1]);
    assert!(long.encode().is_err());
    let longest = Frame::new(Kind::Stdin, 1, vec![0; BODY_BYTES_MAX])
        .encode()
        .unwrap();
    let mut decoder = Decoder::default();
    decoder.push(&longest);
    assert_eq!(
        decoder.next_frame().unwrap().unwrap().body.len(),
        BODY_BYTES_MAX
    );
}
