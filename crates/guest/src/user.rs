//! Users of a sandbox: who a program is to run as, looked up in the sandbox's own lists.
//!
//! A user is written as engines do it: `USER[:GROUP]`, each a name or a number. A number need not
//! be in the lists; a name must. Lines that are no lines of such a list are passed over, and said
//! when they are the reason that nobody was found.
//!
//! Limits: [`LIST_BYTES_MAX`] of each list, [`NAME_BYTES_MAX`] of a name, [`GROUPS_MAX`] groups of
//! a user; more is an error that says so.

use std::{fs::File, io, io::Read, os::unix::fs::OpenOptionsExt, path::Path};

use crate::protocol::{UserCause, UserFailure};

/// The most that is read of a list of users or groups.
pub const LIST_BYTES_MAX: u64 = 4 << 20;
/// The longest name of a user or group, as on every system.
pub const NAME_BYTES_MAX: usize = 255;
/// Groups of one user. The kernel has room for more; no list that is right has them.
pub const GROUPS_MAX: usize = 1024;

/// Where the lists are.
pub(crate) const PASSWD: &str = "/etc/passwd";
pub(crate) const GROUP: &str = "/etc/group";

/// Who a program runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// Number of the user.
    pub uid: u32,
    /// Number of his first group.
    pub gid: u32,
    /// Numbers of all his groups, the first one included, in order.
    pub groups: Vec<u32>,
    /// His name, when the list has one.
    pub name: Option<String>,
    /// His HOME; `/` when the list has none.
    pub home: String,
}

/// A name or a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which<'a> {
    Name(&'a str),
    Number(u32),
}

/// A line of the list of users.
struct PasswdLine<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

fn failure(cause: UserCause, reason: String) -> UserFailure {
    UserFailure { cause, reason }
}

fn unknown(reason: String) -> UserFailure {
    failure(UserCause::Unknown, reason)
}

fn which<'a>(text: &'a str, what: &str) -> Result<Which<'a>, String> {
    if text.is_empty() {
        return Err(format!("the {what} is empty"));
    }
    if text.len() > NAME_BYTES_MAX {
        return Err(format!(
            "the {what} has {} bytes, expected at most {NAME_BYTES_MAX}",
            text.len()
        ));
    }
    if text.chars().any(|c| c.is_control() || c == ':' || c == '/') {
        return Err(format!(
            "{text:?} is no name or number of a {what}: it has characters that no name has"
        ));
    }
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Ok(Which::Name(text));
    }
    // The last number means "nobody changes" to the kernel.
    match text.parse::<u32>() {
        Ok(number) if number != u32::MAX => Ok(Which::Number(number)),
        _ => Err(format!(
            "{what} {text}: expected a number below {}",
            u32::MAX
        )),
    }
}

fn parts(user: &str) -> Result<(Which<'_>, Option<Which<'_>>), String> {
    let (user, group) = match user.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (user, None),
    };
    let user = which(user, "user")?;
    let group = group.map(|group| which(group, "group")).transpose()?;
    Ok((user, group))
}

/// Whether this can name a user at all.
///
/// # Errors
/// The reason why not.
pub fn check(user: &str) -> Result<(), String> {
    parts(user).map(drop)
}

fn passwd_line(line: &str) -> Option<PasswdLine<'_>> {
    let mut fields = line.split(':');
    let (name, _password) = (fields.next()?, fields.next()?);
    let uid = fields.next()?.parse().ok()?;
    let gid = fields.next()?.parse().ok()?;
    let (_comment, home) = (fields.next(), fields.next());
    (!name.is_empty()).then_some(PasswdLine {
        name,
        uid,
        gid,
        home: home.unwrap_or_default(),
    })
}

/// Name, number and members.
fn group_line(line: &str) -> Option<(&str, u32, &str)> {
    let mut fields = line.split(':');
    let (name, _password) = (fields.next()?, fields.next()?);
    let gid = fields.next()?.parse().ok()?;
    (!name.is_empty()).then_some((name, gid, fields.next().unwrap_or_default()))
}

/// Why a name was not found: there is no such line, or it is none that can be read.
fn missing(list: &str, text: Option<&str>, name: &str, shape: &str) -> String {
    let Some(text) = text else {
        return format!("the sandbox has no {list}, and {name:?} is no number");
    };
    let broken = text
        .lines()
        .position(|line| line.split(':').next() == Some(name));
    match broken {
        Some(index) => format!(
            "line {} of {list} names {name:?} and cannot be read, expected {shape}",
            index + 1
        ),
        None => format!("{list} has no {name:?}"),
    }
}

/// Looks a user up in the text of both lists; `None` is a list that is not there.
///
/// # Errors
/// No such user or group, or more groups than anybody has.
pub fn resolve(
    user: &str,
    passwd: Option<&str>,
    group: Option<&str>,
) -> Result<Account, UserFailure> {
    let (wanted, wanted_group) = parts(user).map_err(unknown)?;
    let mut lines = passwd.unwrap_or_default().lines().filter_map(passwd_line);
    let found = lines.find(|line| match wanted {
        Which::Name(name) => line.name == name,
        Which::Number(uid) => line.uid == uid,
    });
    let mut account = match (found, wanted) {
        (Some(line), _) => Account {
            uid: line.uid,
            gid: line.gid,
            groups: Vec::new(),
            name: Some(line.name.to_owned()),
            home: Some(line.home)
                .filter(|home| home.starts_with('/'))
                .unwrap_or("/")
                .to_owned(),
        },
        // As engines do it: the first group of a number that nobody knows is 0.
        (None, Which::Number(uid)) => Account {
            uid,
            gid: 0,
            groups: Vec::new(),
            name: None,
            home: "/".to_owned(),
        },
        (None, Which::Name(name)) => {
            let shape = "NAME:PASSWORD:UID:GID:COMMENT:HOME:SHELL";
            return Err(unknown(missing(PASSWD, passwd, name, shape)));
        }
    };
    let groups = || group.unwrap_or_default().lines().filter_map(group_line);
    let name = account.name.clone();
    let more: Vec<u32> = match (wanted_group, &name) {
        // Whoever names a group wants that one alone.
        (Some(Which::Number(gid)), _) => {
            account.gid = gid;
            Vec::new()
        }
        (Some(Which::Name(wanted)), _) => {
            let line = groups().find(|(name, ..)| *name == wanted);
            let Some((_, gid, _)) = line else {
                let shape = "NAME:PASSWORD:GID:MEMBERS";
                return Err(unknown(missing(GROUP, group, wanted, shape)));
            };
            account.gid = gid;
            Vec::new()
        }
        (None, Some(name)) => groups()
            .filter(|(_, _, members)| members.split(',').any(|m| m.trim() == name))
            .map(|(_, gid, _)| gid)
            .collect(),
        (None, None) => Vec::new(),
    };
    for gid in std::iter::once(account.gid).chain(more) {
        if !account.groups.contains(&gid) {
            account.groups.push(gid);
        }
        if account.groups.len() > GROUPS_MAX {
            let reason = format!("{user:?} is in more than {GROUPS_MAX} groups of {GROUP}");
            return Err(failure(UserCause::Refused, reason));
        }
    }
    // `-1` means "leave it" to the kernel: whoever wrote such a line gets nobody's rights by it.
    if account.uid == u32::MAX || account.groups.contains(&u32::MAX) {
        let reason = format!("{user:?} has the number {}, which is nobody's", u32::MAX);
        return Err(failure(UserCause::Refused, reason));
    }
    Ok(account)
}

/// Reads a list; `None` when it is not there. Bytes that are no text stand for themselves no more.
///
/// # Errors
/// It cannot be read, is no file, or has more than `bytes_max`.
pub(crate) fn read_list(path: &Path, bytes_max: u64) -> io::Result<Option<String>> {
    let say =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let mut options = File::options();
    // A FIFO in its place would be waited for.
    let opened = options.read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(say(error)),
    };
    if !file.metadata().map_err(say)?.is_file() {
        return Err(say(io::Error::other("expected a file, it is none")));
    }
    let mut bytes = Vec::new();
    file.take(bytes_max + 1)
        .read_to_end(&mut bytes)
        .map_err(say)?;
    if bytes.len() as u64 > bytes_max {
        let reason = format!("it has more than {bytes_max} bytes, the most that is read of a list");
        return Err(say(io::Error::other(reason)));
    }
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

/// Looks a user up in the lists of the system that this process sees.
pub(crate) fn of_system(user: &str) -> Result<Account, UserFailure> {
    let read = |path: &str| {
        read_list(Path::new(path), LIST_BYTES_MAX)
            .map_err(|error| failure(UserCause::Refused, error.to_string()))
    };
    resolve(user, read(PASSWD)?.as_deref(), read(GROUP)?.as_deref())
}

/// A list with one more line, unless it knows the number in it, which is the third field.
pub(crate) fn with_number(text: &str, number: u32, line: &str) -> String {
    let number = number.to_string();
    if text.lines().any(|l| l.split(':').nth(2) == Some(&number)) {
        return text.to_owned();
    }
    let separator = if text.is_empty() || text.ends_with('\n') {
        ""
    } else {
        "\n"
    };
    format!("{text}{separator}{line}\n")
}

#[cfg(test)]
mod tests;
