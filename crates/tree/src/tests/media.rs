//! Placeholders of images.

use record::MediaSpan;

use super::call;
use crate::{Builder, Selection, Tree, TreeError, TreeLimits, linearise, select};

const PAD: u32 = 99;

fn image(start: u32, digest: &str) -> MediaSpan {
    MediaSpan {
        start,
        tokens: 3,
        digest: digest.into(),
        size: vec![28, 84],
    }
}

fn seeing(index: u32, prompt: &[u32], spans: &[MediaSpan]) -> record::Call {
    let mut call = call(index, prompt, Some(&[7, 8]));
    call.continuation.media = spans.to_vec();
    call
}

#[test]
fn equal_placeholders_of_unequal_images_part_where_the_image_begins() {
    let prompt = [1, PAD, PAD, PAD, 2];
    let calls = [
        seeing(0, &prompt, &[image(1, "cat")]),
        seeing(1, &prompt, &[image(1, "dog")]),
        seeing(2, &[1, PAD, PAD, PAD, 2, 7, 8, 3], &[image(1, "cat")]),
    ];
    let tree = Tree::build(&calls).unwrap();
    tree.check(&calls).unwrap();
    assert_eq!(tree.nodes[0].tokens, [1]);
    assert!(tree.nodes[0].media.is_empty());
    let cats = &tree.nodes[1];
    assert_eq!(
        (cats.tokens.as_slice(), cats.parent),
        (&[PAD, PAD, PAD, 2][..], Some(0))
    );
    assert_eq!(cats.media, [image(0, "cat")]);
    let dogs = tree.nodes.iter().find(|node| node.first_call == 1).unwrap();
    assert_eq!(
        (dogs.parent, dogs.media.as_slice()),
        (Some(0), &[image(0, "dog")][..])
    );
    assert_eq!(tree.place(2).unwrap().extends, Some(0));
    // Rows carry their images; the embedded learner, which reads text only, refuses them.
    let kept = select(&tree, &Selection::All);
    let rows = linearise(&tree, &kept, None).unwrap();
    assert!(
        rows.rows
            .iter()
            .all(|row| row.media.len() == 1 && row.media[0].start == 1)
    );
    assert!(matches!(
        kept.train_tree(&tree),
        Err(TreeError::MediaTrained { .. })
    ));
}

#[test]
fn two_images_side_by_side_stay_two_and_the_order_of_calls_does_not_matter() {
    let prompt = [PAD; 6];
    let calls = [
        seeing(0, &prompt, &[image(0, "cat"), image(3, "cat")]),
        seeing(1, &prompt, &[image(0, "cat"), image(3, "dog")]),
        call(2, &prompt, Some(&[7])),
    ];
    let tree = Tree::build(&calls).unwrap();
    tree.check(&calls).unwrap();
    assert_eq!(
        tree.nodes
            .iter()
            .filter(|node| node.parent.is_none())
            .count(),
        2
    );
    let mut builder = Builder::new(TreeLimits::default());
    for call in calls.iter().rev() {
        builder.add(call).unwrap();
    }
    assert_eq!(builder.finish().unwrap(), tree);
    let row_of = |call: u32| {
        let path = tree.path(tree.place(call).unwrap().node);
        path.iter()
            .map(|&node| tree.nodes[node].media.len())
            .sum::<usize>()
    };
    assert_eq!((row_of(0), row_of(1), row_of(2)), (2, 2, 0));
}

#[test]
fn spans_that_do_not_fit_are_refused() {
    for spans in [
        vec![image(3, "cat")],
        vec![image(0, "cat"), image(2, "dog")],
        vec![MediaSpan {
            tokens: 0,
            ..image(0, "cat")
        }],
    ] {
        let error = Tree::build(&[seeing(4, &[PAD; 5], &spans)]).unwrap_err();
        assert!(matches!(error, TreeError::Media { call: 4, .. }), "{error}");
    }
}
