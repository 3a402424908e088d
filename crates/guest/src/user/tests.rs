//! The lists of users and groups, right and wrong ones.

use std::os::unix::fs::symlink;

use proptest::prelude::*;

use super::*;

const PASSWD_TEXT: &str = "root:x:0:0:root:/root:/bin/sh\n\
    # a comment\n\
    \n\
    build:x:2001:2001:A builder,,,:/home/build:/bin/sh\n\
    broken:x:many:0::/:/bin/sh\n\
    short:x\n\
    bare:x:2003:2003\n\
    odd:x:2004:2004::relative:/bin/sh\n\
    build:x:9999:9999::/twice:/bin/sh\n\
    :x:2005:2005::/nameless:/bin/sh\n\
    last:x:2006:100::/home/last:/bin/sh";
const GROUP_TEXT: &str = "root:x:0:\n\
    users:x:100:build\n\
    build:x:2001:\n\
    tools:x:3001:other,build\n\
    bad:x:no:build\n\
    near:x:3002:builder,xbuild\n\
    again:x:3001:build\n\
    spaced:x:3003: build ,other";

fn found(user: &str) -> Account {
    resolve(user, Some(PASSWD_TEXT), Some(GROUP_TEXT)).unwrap()
}

fn refused(user: &str) -> UserFailure {
    resolve(user, Some(PASSWD_TEXT), Some(GROUP_TEXT)).unwrap_err()
}

#[test]
fn a_name_brings_number_groups_and_home() {
    let build = found("build");
    assert_eq!(
        (build.uid, build.gid),
        (2001, 2001),
        "the first line counts"
    );
    assert_eq!(build.groups, [2001, 100, 3001, 3003]);
    assert_eq!(build.home, "/home/build");
    assert_eq!(build.name.as_deref(), Some("build"));
    assert_eq!(found("2001"), build, "the number is the same user");
    let last = found("last");
    assert_eq!(
        (last.uid, last.groups),
        (2006, vec![100]),
        "without a newline"
    );
}

#[test]
fn a_group_of_ones_own_is_the_only_one() {
    for user in ["build:tools", "2001:3001", "build:3001", "2001:tools"] {
        let account = found(user);
        assert_eq!((account.uid, account.gid), (2001, 3001), "{user}");
        assert_eq!(account.groups, [3001], "{user}");
        assert_eq!(account.home, "/home/build", "{user}");
    }
}

#[test]
fn a_number_need_not_be_known() {
    let account = found("4000");
    let expected = Account {
        uid: 4000,
        gid: 0,
        groups: vec![0],
        name: None,
        home: "/".to_owned(),
    };
    assert_eq!(account, expected);
    assert_eq!(found("4000:4001").groups, [4001]);
    let nowhere = resolve("4000:4001", None, None).unwrap();
    assert_eq!((nowhere.uid, nowhere.gid), (4000, 4001));
}

#[test]
fn a_home_that_is_none_is_the_root() {
    assert_eq!(found("bare").home, "/");
    assert_eq!(found("odd").home, "/");
}

#[test]
fn who_is_not_there_is_named_with_the_list() {
    for (user, words) in [
        ("nosuch", ["/etc/passwd", "nosuch"]),
        ("buil", ["/etc/passwd", "buil"]),
        ("build:nosuch", ["/etc/group", "nosuch"]),
        // A line that cannot be read is said, with its number and what it should be.
        ("broken", ["line 5", "NAME:PASSWORD:UID:GID"]),
        ("short", ["line 6", "NAME:PASSWORD:UID:GID"]),
        ("build:bad", ["line 5", "NAME:PASSWORD:GID:MEMBERS"]),
    ] {
        let failure = refused(user);
        assert_eq!(failure.cause, UserCause::Unknown, "{user}");
        for word in words {
            assert!(failure.reason.contains(word), "{user}: {}", failure.reason);
        }
    }
    let failure = resolve("build", None, None).unwrap_err();
    assert!(failure.reason.contains("no /etc/passwd"), "{failure:?}");
    let failure = resolve("1:tools", Some(PASSWD_TEXT), None).unwrap_err();
    assert!(failure.reason.contains("no /etc/group"), "{failure:?}");
}

#[test]
fn what_names_nobody_is_refused() {
    let long = "x".repeat(NAME_BYTES_MAX + 1);
    for user in [
        "",
        ":",
        "build:",
        ":tools",
        "a:b:c",
        "4294967295",
        "99999999999",
        "0:4294967295",
        "a\nb",
        "../x",
        "a\0b",
        &long,
    ] {
        assert!(check(user).is_err(), "{user:?}");
        assert_eq!(refused(user).cause, UserCause::Unknown, "{user:?}");
    }
    for user in [
        "root",
        "0",
        "0:0",
        "www-data",
        "domain\\user",
        "user.name@host",
        "é",
    ] {
        assert_eq!(check(user), Ok(()), "{user:?}");
    }
    // Nobody gets everybody's rights by a list either.
    let list = "all:x:4294967295:0::/:/bin/sh\n";
    let failure = resolve("all", Some(list), None).unwrap_err();
    assert_eq!(failure.cause, UserCause::Refused);
}

#[test]
fn more_groups_than_anybody_has_are_refused() {
    let list = |count: usize| -> String {
        (0..count)
            .map(|n| format!("g{n}:x:{}:build\n", 10_000 + n))
            .collect()
    };
    let some = resolve("build", Some(PASSWD_TEXT), Some(&list(GROUPS_MAX - 1)));
    assert_eq!(some.unwrap().groups.len(), GROUPS_MAX);
    let failure = resolve("build", Some(PASSWD_TEXT), Some(&list(GROUPS_MAX))).unwrap_err();
    assert_eq!(failure.cause, UserCause::Refused);
    assert!(failure.reason.contains("1024"), "{}", failure.reason);
}

#[test]
fn a_list_is_a_file_of_limited_size() {
    let folder = std::env::temp_dir().join(format!("espalier-user-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("passwd");
    assert_eq!(read_list(&path, 10).unwrap(), None, "it need not be there");
    std::fs::write(&path, "0123456789").unwrap();
    assert_eq!(read_list(&path, 10).unwrap().as_deref(), Some("0123456789"));
    let error = read_list(&path, 9).unwrap_err().to_string();
    assert!(
        error.contains("more than 9 bytes") && error.contains("passwd"),
        "{error}"
    );
    std::fs::write(&path, b"a:\xff:1:1\n").unwrap();
    assert_eq!(
        read_list(&path, 99).unwrap().as_deref(),
        Some("a:\u{fffd}:1:1\n")
    );
    symlink(&path, folder.join("link")).unwrap();
    assert!(
        read_list(&folder.join("link"), 99).unwrap().is_some(),
        "as some systems have it"
    );
    let error = read_list(&folder, 99).unwrap_err().to_string();
    assert!(error.contains("expected a file"), "{error}");
    // One that nobody writes to would be waited for.
    let fifo = folder.join("fifo");
    let made = std::process::Command::new("mkfifo")
        .arg(&fifo)
        .status()
        .unwrap();
    assert!(made.success());
    assert!(
        read_list(&fifo, 99)
            .unwrap_err()
            .to_string()
            .contains("expected a file")
    );
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_line_is_added_once() {
    let line = "agent:x:1000:1000::/home/agent:/bin/sh";
    assert_eq!(with_number("", 1000, line), format!("{line}\n"));
    assert_eq!(
        with_number("root:x:0:0:root:/root:/bin/sh", 1000, line),
        format!("root:x:0:0:root:/root:/bin/sh\n{line}\n")
    );
    let known = "node:x:1000:1000::/home/node:/bin/bash\n";
    assert_eq!(with_number(known, 1000, line), known);
}

proptest! {
    /// Whatever the lists are, the answer is an account that can be switched to, or a reason.
    #[test]
    fn any_lists_give_an_account_or_a_reason(
        user in "[a-c0-9:]{0,6}",
        passwd in "([a-c]{0,2}:x?:[0-9]{0,3}:[0-9]{0,3}(:[^\n]{0,4}){0,3}\n?){0,6}",
        group in "([a-c]{0,2}:x?:[0-9]{0,3}:[a-c,]{0,5}\n?){0,6}",
    ) {
        match resolve(&user, Some(&passwd), Some(&group)) {
            Ok(account) => {
                prop_assert!(account.groups.first() == Some(&account.gid));
                prop_assert!(account.home.starts_with('/'));
                prop_assert!(check(&user).is_ok());
            }
            Err(failure) => prop_assert!(!failure.reason.is_empty()),
        }
    }
}
