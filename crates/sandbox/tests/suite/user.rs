//! Programs of other users.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use sandbox::{Chunk, Exec, Exit, Output, Sandbox, SandboxError};
use tokio::sync::mpsc;

use super::{cases, count, is_there, run, say, script, until};

/// A number that no image knows, with a group of its own.
const STRANGER: &str = "2002:2003";
/// What root may do in a sandbox, as the kernel writes it: files and users, nothing else.
const ROOT_CAPABILITIES: &str = "00000000000000fb";

fn as_user(user: &str, text: &str) -> Exec {
    Exec {
        user: Some(user.to_owned()),
        ..script(text)
    }
}

/// What a script of another user says; it must succeed.
async fn say_as(sandbox: &dyn Sandbox, user: &str, text: &str) -> String {
    let output = run_as(sandbox, user, text).await;
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.exit, Exit::Code(0), "{user}: {text}: {errors}");
    String::from_utf8_lossy(&output.stdout)
        .trim_end()
        .to_owned()
}

async fn run_as(sandbox: &dyn Sandbox, user: &str, text: &str) -> Output {
    match sandbox.exec(as_user(user, text)).await {
        Ok(output) => output,
        Err(error) => panic!("{user}: {error}"),
    }
}

/// The reason why there is no such user; user and image must be named.
async fn unknown(sandbox: &dyn Sandbox, user: &str) -> String {
    let result = sandbox.exec(as_user(user, "touch /tmp/ran")).await;
    let Err(error) = result else {
        panic!("{user}: it ran: {result:?}");
    };
    let text = error.to_string();
    let SandboxError::NoSuchUser {
        user: named,
        image,
        reason,
        ..
    } = error
    else {
        panic!("{user}: {error:?}");
    };
    assert_eq!(&*named, user);
    assert!(!image.is_empty() && text.contains(&*image), "{text}");
    assert!(
        text.contains(&format!("{user:?}")) && text.contains("expected"),
        "{text}"
    );
    reason.into_string()
}

/// Waits until no process has this in its command line.
async fn gone(sandbox: &dyn Sandbox, mark: &str) {
    let begun = Instant::now();
    while count(sandbox, mark).await > 0 {
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "{mark} is still there"
        );
    }
}

/// All lines of a status that begin with one of these, without their names.
fn status(keys: &str) -> String {
    format!("grep -E '^({keys}):' /proc/self/status | tr -s '\\t ' ' ' | cut -d' ' -f2-")
}

cases! {
    async fn a_user_by_number(world) {
        let sandbox = world.sandbox().await;
        if !world.users {
            return;
        }
        let text = "id -u; id -g; id -G; id -ru";
        assert_eq!(say_as(&*sandbox, STRANGER, text).await, "2002\n2003\n2003\n2002");
        // As engines do it: nobody knows this number, so its group is 0.
        assert_eq!(say_as(&*sandbox, "4000", "id -u; id -G").await, "4000\n0");
        assert_eq!(say(&*sandbox, "id -u; id -g").await, "1000\n1000", "of one exec only");
    }

    async fn root_by_name_has_the_rights_over_files_and_users(world) {
        let sandbox = world.sandbox().await;
        if !world.users {
            return;
        }
        say(&*sandbox, "echo mine > secret; chmod 600 secret; mkdir -m 700 closed").await;
        let text = "id -u; id -g; cat secret; echo root > closed/file; chown 2002:2003 closed/file; \
                    stat -c '%u %g' closed/file";
        assert_eq!(say_as(&*sandbox, "root", text).await, "0\n0\nmine\n2002 2003");
        let keys = "CapEff|CapPrm|CapInh|CapAmb";
        let sets = say_as(&*sandbox, "root", &status(keys)).await;
        let none = "0000000000000000";
        let mut expected = vec![none, ROOT_CAPABILITIES, ROOT_CAPABILITIES, none];
        expected.sort_unstable();
        let mut found: Vec<&str> = sets.lines().collect();
        found.sort_unstable();
        assert_eq!(found, expected);
        for text in ["mount -t tmpfs none /tmp", "mknod disk b 8 0", "chroot / true", "echo x > /proc/sys/kernel/core_pattern", "cat /proc/1/environ"] {
            let output = run_as(&*sandbox, "root", text).await;
            assert_ne!(output.exit, Exit::Code(0), "{text}");
        }
    }

    async fn another_user_has_no_capabilities(world) {
        let sandbox = world.sandbox().await;
        if !world.users {
            return;
        }
        let keys = "CapEff|CapPrm|CapInh|CapAmb|NoNewPrivs|Seccomp";
        let none = "0000000000000000";
        let sets = say_as(&*sandbox, STRANGER, &status(keys)).await;
        assert_eq!(sets, [none, none, none, none, "1", "2"].join("\n"));
        // A program that would make him root does not.
        say_as(&*sandbox, "root", "cp /bin/sh /tmp/sh; chmod 4755 /tmp/sh").await;
        assert_eq!(say_as(&*sandbox, STRANGER, "/tmp/sh -c 'id -u'").await, "2002");
        assert_eq!(say(&*sandbox, "/tmp/sh -c 'id -u'").await, "1000");
    }

    async fn files_of_users_are_apart(world) {
        let sandbox = world.sandbox().await;
        if !world.users {
            return;
        }
        let text = "umask; echo his > /tmp/his; chmod 600 /tmp/his; echo x > /workspace/x";
        let output = run_as(&*sandbox, STRANGER, text).await;
        assert_ne!(output.exit, Exit::Code(0), "the workspace is not his");
        assert_eq!(output.stdout, b"0022\n");
        assert_ne!(run(&*sandbox, "cat /tmp/his").await.exit, Exit::Code(0));
        assert_eq!(say_as(&*sandbox, STRANGER, "cat /tmp/his").await, "his");
        assert_eq!(say_as(&*sandbox, "0:0", "stat -c '%u %g' /tmp/his").await, "2002 2003");
    }

    async fn the_environment_says_who_it_is(world) {
        let mut spec = world.spec();
        let sandbox = world.make(spec.clone()).await;
        if !world.users {
            return;
        }
        let text = "echo \"$HOME ${USER-none} ${LOGNAME-none} $FROM_SPEC\"";
        assert_eq!(say_as(&*sandbox, "root", text).await, "/root root root spec");
        assert_eq!(say_as(&*sandbox, STRANGER, text).await, "/ none none spec");
        let mut exec = as_user("root", text);
        exec.env = [("HOME", "/tmp"), ("USER", "me")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into();
        assert_eq!(sandbox.exec(exec).await.unwrap().stdout, b"/tmp me root spec\n");
        assert!(say(&*sandbox, text).await.starts_with("/home/agent "), "of others only");
        spec.env.insert("HOME".to_owned(), "/from/spec".to_owned());
        spec.name.push_str("-home");
        let sandbox = world.make(spec).await;
        assert_eq!(say_as(&*sandbox, "root", text).await, "/from/spec root root spec");
    }

    async fn users_and_groups_of_the_image(world) {
        if !world.accounts {
            return;
        }
        let sandbox = world.sandbox().await;
        let reason = unknown(&*sandbox, "broken").await;
        assert!(reason.contains("line 3 of /etc/passwd"), "{reason}");
        let reason = unknown(&*sandbox, "build:nosuch").await;
        assert!(reason.contains("/etc/group"), "{reason}");
        if !world.users {
            return;
        }
        // Files of the image belong to whom they belong to in the image.
        assert_eq!(say_as(&*sandbox, "root", "cat /etc/shadow").await, "for root only");
        assert_ne!(run_as(&*sandbox, "build", "cat /etc/shadow").await.exit, Exit::Code(0));
        assert_ne!(run(&*sandbox, "cat /etc/shadow").await.exit, Exit::Code(0));
        let text = "id -u; id -g; id -G; echo $HOME $USER $LOGNAME";
        let build = "2001\n2001\n2001 3001\n/home/build build build";
        assert_eq!(say_as(&*sandbox, "build", text).await, build);
        assert_eq!(say_as(&*sandbox, "2001", text).await, build, "the number is the same user");
        let alone = "2001\n3001\n3001\n/home/build build build";
        assert_eq!(say_as(&*sandbox, "build:tools", text).await, alone);
        assert_eq!(say_as(&*sandbox, "2001:3001", text).await, alone);
    }

    async fn a_user_who_is_not_there(world) {
        let sandbox = world.sandbox().await;
        let reason = unknown(&*sandbox, "no-such-user").await;
        assert!(reason.contains("/etc/passwd") && reason.contains("no-such-user"), "{reason}");
        for user in ["", ":", "root:", "a:b:c", "4294967295", "../etc", "root\n"] {
            unknown(&*sandbox, user).await;
        }
        assert!(!is_there(&*sandbox, "/tmp/ran").await, "nothing was run");
        assert_eq!(say(&*sandbox, "echo alive").await, "alive");
    }

    async fn the_hosts_users_are_not_the_sandboxs(world) {
        let sandbox = world.sandbox().await;
        let ours = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        let names = |text: &str| -> BTreeSet<String> {
            text.lines().filter_map(|l| Some(l.split(':').next()?.to_owned())).collect()
        };
        let theirs = names(&say(&*sandbox, "cat /etc/passwd").await);
        for name in names(&ours).difference(&theirs).filter(|n| !n.is_empty()).take(3) {
            unknown(&*sandbox, name).await;
        }
    }

    async fn the_sandboxs_own_user_by_number(world) {
        let sandbox = world.sandbox().await;
        for user in ["1000", "1000:1000"] {
            let text = "id -u; id -g; grep CapEff /proc/self/status | cut -f2";
            assert_eq!(say_as(&*sandbox, user, text).await, "1000\n1000\n0000000000000000", "{user}");
        }
        let name = say(&*sandbox, "id -un").await;
        assert_eq!(say_as(&*sandbox, &name, "id -u; echo $USER").await, format!("1000\n{name}"));
    }

    async fn who_cannot_be_switched_to_is_refused(world) {
        let sandbox = world.sandbox().await;
        // Beyond all numbers that a sandbox has, or, where it has all, another user as usual.
        let mut refused = vec!["4000000000:4000000000"];
        if !world.users {
            refused.extend(["root", "0", STRANGER, "1000:0"]);
        }
        for user in refused {
            match sandbox.exec(as_user(user, "id -u; touch /tmp/ran-as")).await {
                Err(SandboxError::CannotSwitchUser { user: named, reason, hint, .. }) => {
                    assert_eq!(&*named, user);
                    assert!(!reason.is_empty() && !hint.is_empty(), "{user}: {reason}; {hint}");
                    assert!(!is_there(&*sandbox, "/tmp/ran-as").await, "{user}: it ran");
                }
                Ok(output) if world.users => {
                    assert_eq!(output.stdout, b"4000000000\n", "it ran as somebody else");
                }
                other => panic!("{user}: {other:?}"),
            }
        }
        assert_eq!(say(&*sandbox, "id -u").await, "1000");
    }

    async fn a_tree_of_another_user_is_killed_at_its_timeout(world) {
        let sandbox = world.sandbox().await;
        if !world.users {
            return;
        }
        for (user, mark) in [(STRANGER, "7301"), ("root", "7302")] {
            let text = format!(
                "setsid sh -c 'setsid sleep {mark} & sleep {mark} & wait' & trap '' TERM INT; sleep {mark}"
            );
            let mut exec = as_user(user, &text);
            exec.timeout = Duration::from_millis(700);
            let output = sandbox.exec(exec).await.unwrap();
            assert_eq!(output.exit, Exit::TimedOut, "{user}");
            assert_eq!(count(&*sandbox, mark).await, 0, "{user}");
        }
        assert_eq!(say(&*sandbox, "echo alive").await, "alive");
    }

    async fn a_tree_of_another_user_is_killed_when_nobody_waits(world) {
        let sandbox = world.sandbox().await;
        if !world.users {
            return;
        }
        let text = "touch /tmp/begun; sleep 7303 & sleep 7303";
        {
            let running = sandbox.exec(as_user(STRANGER, text));
            let begun = until(&*sandbox, "test -e /tmp/begun");
            tokio::select! {
                result = running => panic!("{result:?}"),
                () = begun => {}
            }
        }
        gone(&*sandbox, "7303").await;
    }

    async fn what_another_user_leaves_is_ended_or_stays(world) {
        let sandbox = world.sandbox().await;
        if !world.users {
            return;
        }
        let leave = "setsid sleep 7304 > /dev/null 2>&1 & true";
        let mut exec = as_user(STRANGER, leave);
        exec.end_background = true;
        assert_eq!(sandbox.exec(exec).await.unwrap().exit, Exit::Code(0));
        assert_eq!(count(&*sandbox, "7304").await, 0);
        say_as(&*sandbox, STRANGER, leave).await;
        assert_eq!(count(&*sandbox, "7304").await, 1);
        // And nobody but root and he himself ends it.
        let kill = "ended=1; for p in /proc/[0-9]*; do \
                    tr '\\0' ' ' < $p/cmdline 2>/dev/null | grep -q '^sleep [7]304' || continue; \
                    kill -9 ${p#/proc/} && ended=0; done; exit $ended";
        assert_ne!(run(&*sandbox, kill).await.exit, Exit::Code(0));
        assert_eq!(count(&*sandbox, "7304").await, 1);
        say_as(&*sandbox, "root", kill).await;
        gone(&*sandbox, "7304").await;
    }

    async fn what_root_starts_as_others_is_killed_too(world) {
        if !world.users || !world.accounts {
            return;
        }
        let sandbox = world.sandbox().await;
        let text = "su -s /bin/sh build -c 'id -u > /tmp/who; sleep 7305 & sleep 7305'";
        let mut exec = as_user("root", text);
        exec.timeout = Duration::from_millis(1500);
        assert_eq!(sandbox.exec(exec).await.unwrap().exit, Exit::TimedOut);
        assert_eq!(say(&*sandbox, "cat /tmp/who").await, "2001");
        assert_eq!(count(&*sandbox, "7305").await, 0);
    }

    /// A verifier of another user cannot be ended by what the harness left.
    async fn the_sandboxs_own_programs_cannot_end_those_of_others(world) {
        let sandbox = world.sandbox().await;
        if !world.users {
            return;
        }
        let storm = "(while :; do kill -STOP -1; kill -9 -1; done) > /dev/null 2>&1 & echo begun";
        let attack = sandbox.exec(script(storm));
        let _ = attack.await;
        for user in [STRANGER, "root"] {
            let text = "i=0; while [ $i -lt 60 ]; do i=$((i + 1)); id > /dev/null; done; echo whole";
            assert_eq!(say_as(&*sandbox, user, text).await, "whole", "{user}");
        }
        // It went on to the end.
        let text = "grep -l 'kill [-]STOP' /proc/[0-9]*/cmdline 2>/dev/null | wc -l";
        assert_ne!(say_as(&*sandbox, "root", text).await.trim(), "0");
    }

    async fn streams_are_those_of_the_user(world) {
        let sandbox = world.sandbox().await;
        if !world.users {
            return;
        }
        // Opened anew, as many programs do.
        let text = "echo out > /dev/stdout; echo err > /dev/stderr";
        let output = run_as(&*sandbox, STRANGER, text).await;
        assert_eq!((output.stdout, output.stderr), (b"out\n".to_vec(), b"err\n".to_vec()));
        let mut exec = as_user(STRANGER, "cat");
        exec.stdin = b"kept".to_vec();
        assert_eq!(sandbox.exec(exec).await.unwrap().stdout, b"kept");
        let (sender, mut receiver) = mpsc::channel(8);
        let exec = as_user(STRANGER, "id -u; cat /dev/stdin > /dev/stdout; exit 3");
        let mut input = b"streamed".as_slice();
        let (output, stdout) = tokio::join!(sandbox.exec_streaming(exec, &mut input, sender), async {
            let mut bytes = Vec::new();
            while let Some(chunk) = receiver.recv().await {
                if let Chunk::Stdout(piece) = chunk {
                    bytes.extend(piece);
                }
            }
            bytes
        });
        assert_eq!(output.unwrap().exit, Exit::Code(3));
        assert_eq!(String::from_utf8_lossy(&stdout), "2002\nstreamed");
    }

    async fn the_working_folder_is_entered_as_engines_do_it(world) {
        let sandbox = world.sandbox().await;
        if !world.users {
            return;
        }
        assert_eq!(say_as(&*sandbox, STRANGER, "pwd").await, "/workspace");
        say(&*sandbox, "mkdir -m 700 /tmp/closed; echo x > /tmp/closed/file").await;
        let mut exec = as_user(STRANGER, "echo in; cat file");
        exec.cwd = Some("/tmp/closed".into());
        let output = sandbox.exec(exec).await.unwrap();
        // It begins there, and what is there stays closed to him.
        assert_eq!(output.stdout, b"in\n");
        assert_ne!(output.exit, Exit::Code(0));
        let mut exec = as_user(STRANGER, "true");
        exec.cwd = Some("/absent".into());
        match sandbox.exec(exec).await {
            Err(SandboxError::NotRunnable { reason, .. }) => assert!(reason.contains("/absent"), "{reason}"),
            other => panic!("{other:?}"),
        }
    }
}
