//! The part of a Dockerfile that a sandbox without images can honour.
//!
//! | instruction | what becomes of it |
//! |---|---|
//! | `FROM` a plain Debian, Ubuntu, Python or Node image | the system of the sandbox stands in for it |
//! | `COPY`, `ADD` of files in the build folder | files of the task |
//! | `ENV`, `ARG` with a value | environment variables |
//! | `WORKDIR` | the workspace; folders are made |
//! | `USER` | the user of the harness |
//! | `RUN` of `apt-get`/`apt install`, `pip install`, `npm install -g`, `mkdir -p`, `rm -rf` of package lists | packages that must be there; nothing is installed |
//! | `CMD`, `ENTRYPOINT`, `EXPOSE`, `LABEL`, `SHELL`, `STOPSIGNAL`, `MAINTAINER`, `HEALTHCHECK` | nothing: they say how a container is started |
//!
//! Anything else is a refusal with line and reason, never a guess: a task whose environment is
//! half made gives scores that mean nothing.

use std::{
    collections::BTreeMap,
    path::{Component, Path, PathBuf},
};

use crate::{Requirement, TaskError, TaskFile, tree};

/// What a Dockerfile asks for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Image {
    pub(crate) base: Option<String>,
    pub(crate) workdir: Option<PathBuf>,
    pub(crate) user: Option<String>,
    pub(crate) env: BTreeMap<String, String>,
    /// Absolute paths.
    pub(crate) files: Vec<TaskFile>,
    pub(crate) requires: Vec<Requirement>,
    pub(crate) refusals: Vec<String>,
}

/// Images for which a plain system with the same programs can stand in.
const KNOWN: [&str; 5] = ["debian", "ubuntu", "python", "node", "buildpack-deps"];

/// Reads `Dockerfile` in the build folder.
pub(crate) fn read(folder: &Path) -> Result<Image, TaskError> {
    let file = folder.join("Dockerfile");
    let text = tree::read_text(&file)?;
    let mut image = Image::default();
    for (line, words) in instructions(&text) {
        if let Err(reason) = image.apply(&words, folder)? {
            image
                .refusals
                .push(format!("{}:{line}: {reason}", file.display()));
        }
    }
    if image.base.is_none() {
        image.refusals.push(format!("{}: no FROM", file.display()));
    }
    image.requires.sort();
    image.requires.dedup();
    Ok(image)
}

/// Instructions with their first line, continuation lines joined, comments left out.
fn instructions(text: &str) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for (index, line) in text.lines().enumerate() {
        let bare = line.trim();
        if bare.starts_with('#') || (bare.is_empty() && open.is_none()) {
            continue;
        }
        let (at, mut whole) = open.take().unwrap_or((index + 1, String::new()));
        match bare.strip_suffix('\\') {
            Some(part) => {
                whole.push_str(part);
                whole.push(' ');
                open = Some((at, whole));
            }
            None => {
                whole.push_str(bare);
                found.push((at, whole));
            }
        }
    }
    found.extend(open);
    found
}

/// An absolute path without `.` and `..`.
fn normal(base: &Path, path: &str) -> PathBuf {
    let mut clean = PathBuf::from("/");
    for part in base.join(path).components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::ParentDir => {
                clean.pop();
            }
            _ => {}
        }
    }
    clean
}

impl Image {
    fn here(&self) -> PathBuf {
        self.workdir.clone().unwrap_or_else(|| PathBuf::from("/"))
    }

    /// The inner error is a reason to refuse.
    fn apply(&mut self, words: &str, folder: &Path) -> Result<Result<(), String>, TaskError> {
        let (verb, rest) = words.split_once(char::is_whitespace).unwrap_or((words, ""));
        let rest = rest.trim();
        Ok(match verb.to_ascii_uppercase().as_str() {
            "FROM" => self.from(rest),
            "WORKDIR" => {
                self.workdir = Some(normal(&self.here(), &self.expand(rest)));
                Ok(())
            }
            "USER" => {
                self.user = Some(self.expand(rest));
                Ok(())
            }
            "ENV" => self.assign(rest, true),
            "ARG" => self.assign(rest, false),
            "COPY" | "ADD" => return self.copy(rest, folder),
            "RUN" => self.run(rest),
            "CMD" | "ENTRYPOINT" | "EXPOSE" | "LABEL" | "SHELL" | "STOPSIGNAL" | "MAINTAINER"
            | "HEALTHCHECK" => Ok(()),
            other => Err(format!("{other} is not supported without images")),
        })
    }

    fn from(&mut self, rest: &str) -> Result<(), String> {
        if self.base.is_some() {
            return Err("a build of several stages needs an image builder".to_owned());
        }
        let name = rest
            .split_whitespace()
            .find(|word| !word.starts_with("--"))
            .unwrap_or_default();
        self.base = Some(name.to_owned());
        let short = name.strip_prefix("docker.io/").unwrap_or(name);
        let short = short.strip_prefix("library/").unwrap_or(short);
        let repository = short.split([':', '@']).next().unwrap_or_default();
        if KNOWN.contains(&repository) {
            Ok(())
        } else {
            Err(format!(
                "the image {name} is not one of {}, for which this system can stand in",
                KNOWN.join(", ")
            ))
        }
    }

    fn assign(&mut self, rest: &str, old_form: bool) -> Result<(), String> {
        let words = split(rest)?;
        let first = words.first().cloned().unwrap_or_default();
        if old_form && !first.contains('=') {
            let (name, value) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
            let value = self.expand(value.trim());
            self.env.insert(name.to_owned(), value);
            return Ok(());
        }
        for word in words {
            match word.split_once('=') {
                Some((name, value)) => {
                    let value = self.expand(value);
                    self.env.insert(name.to_owned(), value);
                }
                // An ARG without a value is empty unless somebody builds with one.
                None => {
                    self.env.entry(word).or_default();
                }
            }
        }
        Ok(())
    }

    /// `$NAME`, `${NAME}` and `${NAME:-default}` from what was assigned so far.
    fn expand(&self, text: &str) -> String {
        expand(text, |name| self.env.get(name).cloned())
    }

    fn copy(&mut self, rest: &str, folder: &Path) -> Result<Result<(), String>, TaskError> {
        if rest.starts_with('[') {
            return Ok(Err("COPY in the form of a list is not supported".to_owned()));
        }
        let words: Vec<String> = match split(rest) {
            Ok(words) => words,
            Err(reason) => return Ok(Err(reason)),
        };
        let mut words: Vec<String> = words.iter().map(|word| self.expand(word)).collect();
        if let Some(flag) = words.iter().find(|word| {
            word.starts_with("--") && !word.starts_with("--chown") && !word.starts_with("--chmod")
        }) {
            return Ok(Err(format!("COPY {flag} is not supported")));
        }
        words.retain(|word| !word.starts_with("--"));
        let Some(target) = words.pop().filter(|_| !words.is_empty()) else {
            return Ok(Err("COPY without source and target".to_owned()));
        };
        let is_folder = target.ends_with('/') || target == "." || words.len() > 1;
        let target = normal(&self.here(), &target);
        for source in &words {
            if source.contains(['*', '?', '[']) || source.contains("://") {
                return Ok(Err(format!(
                    "COPY {source}: patterns and addresses are not supported"
                )));
            }
            let inner = normal(Path::new("/"), source);
            let inner = inner.strip_prefix("/").unwrap_or(&inner);
            let from = folder.join(inner);
            if from.is_dir() {
                for file in tree::read(&from)? {
                    self.put(TaskFile {
                        path: target.join(&file.path),
                        ..file
                    });
                }
            } else if from.is_file() {
                let name = from.file_name().unwrap_or_default();
                let path = if is_folder {
                    target.join(name)
                } else {
                    target.clone()
                };
                let parent = from.parent().unwrap_or(folder);
                let file = tree::read_one(parent, Path::new(name))?;
                self.put(TaskFile { path, ..file });
            } else {
                return Ok(Err(format!("COPY {source}: not in the build folder")));
            }
        }
        Ok(Ok(()))
    }

    /// Later copies win, as in layers.
    fn put(&mut self, file: TaskFile) {
        self.files.retain(|old| old.path != file.path);
        self.files.push(file);
    }

    fn run(&mut self, rest: &str) -> Result<(), String> {
        if rest.contains("<<") || rest.starts_with('[') || rest.starts_with("--") {
            return Err("RUN with a here-document, a list or a mount is not supported".to_owned());
        }
        for command in rest.split("&&").flat_map(|part| part.split(';')) {
            let words = split(command.trim())?;
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            self.command(&words)?;
        }
        Ok(())
    }

    fn command(&mut self, words: &[&str]) -> Result<(), String> {
        // Assignments before a command: DEBIAN_FRONTEND=noninteractive apt-get …
        let start = words.iter().position(|word| {
            !word.split_once('=').is_some_and(|(name, _)| {
                !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
            })
        });
        let words = &words[start.unwrap_or(words.len())..];
        let packages = |skip: usize| {
            words[skip.min(words.len())..]
                .iter()
                .filter(|word| !word.starts_with('-'))
                .map(|word| (*word).to_owned())
        };
        match words {
            []
            | ["set" | "true" | ":", ..]
            | [
                "apt-get" | "apt",
                "update" | "clean" | "upgrade" | "autoremove" | "autoclean",
                ..,
            ] => Ok(()),
            ["apt-get" | "apt", flags @ ..] if flags.contains(&"install") => {
                let at = flags
                    .iter()
                    .position(|word| *word == "install")
                    .unwrap_or(0)
                    + 2;
                self.requires.extend(packages(at).map(|name| {
                    Requirement::Apt(name.split('=').next().unwrap_or_default().to_owned())
                }));
                Ok(())
            }
            ["apt-get" | "apt", flags @ ..]
                if flags.contains(&"update") || flags.contains(&"clean") =>
            {
                Ok(())
            }
            ["pip" | "pip3", "install", ..] => self.pip(&words[2..]),
            ["python" | "python3", "-m", "pip", "install", ..] => self.pip(&words[4..]),
            ["npm", "install" | "i", flags @ ..]
                if flags.contains(&"-g") || flags.contains(&"--global") =>
            {
                self.requires.extend(packages(2).map(Requirement::Npm));
                Ok(())
            }
            ["mkdir", ..] => Ok(()),
            ["rm", .., place]
                if place.starts_with("/var/lib/apt")
                    || place.starts_with("/var/cache")
                    || place.starts_with("/root/.cache") =>
            {
                Ok(())
            }
            _ => Err(format!(
                "RUN {} is not one of apt, pip, npm -g install; it needs an image builder",
                words.join(" ")
            )),
        }
    }

    fn pip(&mut self, words: &[&str]) -> Result<(), String> {
        let mut skip = false;
        for word in words {
            if std::mem::take(&mut skip) {
                continue;
            }
            match *word {
                "-r" | "--requirement" | "-c" | "-e" => {
                    return Err(format!(
                        "pip install {word} is not supported: list the packages"
                    ));
                }
                "--index-url" | "-i" | "--extra-index-url" | "--target" | "-t" => skip = true,
                flag if flag.starts_with('-') => {}
                name if name.starts_with('.') || name.contains('/') => {
                    return Err(format!(
                        "pip install {name} is not supported: it is no package name"
                    ));
                }
                name => self.requires.push(Requirement::Pip(name.to_owned())),
            }
        }
        Ok(())
    }
}

/// Words of a shell command without expansions; quotes and backslashes as a shell has them.
/// Whatever needs a shell (pipes, redirections, substitutions) is a reason to refuse.
fn split(text: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\'' | '"' => {
                let open = word.get_or_insert_default();
                loop {
                    match letters.next() {
                        None => return Err(format!("an open quote in {text:?}")),
                        Some(end) if end == letter => break,
                        Some('\\') if letter == '"' => open.extend(letters.next()),
                        Some(inner) => open.push(inner),
                    }
                }
            }
            '\\' => word.get_or_insert_default().extend(letters.next()),
            '|' | '>' | '<' | '`' | '&' => {
                return Err(format!(
                    "{text:?} needs a shell ({letter}); it needs an image builder"
                ));
            }
            blank if blank.is_whitespace() => words.extend(word.take()),
            other => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    Ok(words)
}

/// `$NAME`, `${NAME}`, `${NAME:-default}`; an unknown name is empty.
pub(crate) fn expand(text: &str, value: impl Fn(&str) -> Option<String>) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some((inner, after)) = rest.strip_prefix('{').and_then(|rest| rest.split_once('}')) {
            let (name, default) = inner.split_once(":-").unwrap_or((inner, ""));
            let found = value(name).filter(|found| !found.is_empty());
            out.push_str(&found.unwrap_or_else(|| default.to_owned()));
            rest = after;
        } else {
            let end = rest
                .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
                .unwrap_or(rest.len());
            if end == 0 {
                out.push('$');
            } else {
                out.push_str(&value(&rest[..end]).unwrap_or_default());
                rest = &rest[end..];
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(text: &str) -> Image {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("Dockerfile"), text).unwrap();
        std::fs::create_dir(folder.path().join("data")).unwrap();
        std::fs::write(folder.path().join("data/a.csv"), "1").unwrap();
        std::fs::write(folder.path().join("b.txt"), "2").unwrap();
        let mut image = read(folder.path()).unwrap();
        let prefix = folder.path().display().to_string();
        for refusal in &mut image.refusals {
            *refusal = refusal.replace(&prefix, "");
        }
        image
    }

    #[test]
    fn the_supported_part_is_read_as_docker_reads_it() {
        let image = image(
            "# a comment\nFROM python:3.12-slim\nARG V=2\nENV A=\"x y\" B=${V}\nENV C plain words\n\
             WORKDIR /app\nWORKDIR sub\nRUN apt-get update && apt-get install -y --no-install-recommends \\\n    git jq=1.6 \\\n && rm -rf /var/lib/apt/lists/*\n\
             RUN pip install --no-cache-dir 'pandas==2.2' pytest\nCOPY data/ data/\nCOPY b.txt ./renamed.txt\nUSER agent\nCMD [\"bash\"]\n",
        );
        assert_eq!(image.refusals, Vec::<String>::new());
        assert_eq!(image.workdir, Some("/app/sub".into()));
        assert_eq!(image.user.as_deref(), Some("agent"));
        assert_eq!(image.env["A"], "x y");
        assert_eq!(image.env["B"], "2");
        assert_eq!(image.env["C"], "plain words");
        let paths: Vec<_> = image
            .files
            .iter()
            .map(|file| file.path.display().to_string())
            .collect();
        assert_eq!(paths, ["/app/sub/data/a.csv", "/app/sub/renamed.txt"]);
        assert_eq!(
            image.requires,
            [
                Requirement::Apt("git".into()),
                Requirement::Apt("jq".into()),
                Requirement::Pip("pandas==2.2".into()),
                Requirement::Pip("pytest".into()),
            ]
        );
    }

    #[test]
    fn everything_else_is_refused_with_its_line() {
        let image = image(
            "FROM ghcr.io/some/image:1\nRUN curl -fsSL https://x.y | sh\nRUN make all\nCOPY --from=build /a /b\nCOPY none /x\nRUN pip install -r req.txt\nVOLUME /data\nFROM debian\n",
        );
        insta::assert_snapshot!(image.refusals.join("\n"), @r#"
        /Dockerfile:1: the image ghcr.io/some/image:1 is not one of debian, ubuntu, python, node, buildpack-deps, for which this system can stand in
        /Dockerfile:2: "curl -fsSL https://x.y | sh" needs a shell (|); it needs an image builder
        /Dockerfile:3: RUN make all is not one of apt, pip, npm -g install; it needs an image builder
        /Dockerfile:4: COPY --from=build is not supported
        /Dockerfile:5: COPY none: not in the build folder
        /Dockerfile:6: pip install -r is not supported: list the packages
        /Dockerfile:7: VOLUME is not supported without images
        /Dockerfile:8: a build of several stages needs an image builder
        "#);
    }
}
