//! Services and tool servers that tasks declare.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use support::{only, tree};
use task::load_dir;

const MAIL: &[(&str, &str)] = &[
    (
        "t/task.toml",
        "format = 1\nid = \"mail\"\nfamily = \"mail\"\n[verifier]\nargv = [\"sh\", \".verify/check.sh\"]\n\
         [[services]]\nname = \"mail\"\nport = 9100\nrecords = \"messages\"\ndata = \"mail.json\"\n\
         [[services.routes]]\npath = \"/mail/messages\"\nact = \"list\"\ncontains = {query = \"subject\"}\n\
         [[services.routes]]\npath = \"/mail/send\"\nact = \"note\"\ntakes = [\"to\"]\nlog = \"sent\"\ntool = {name = \"send_mail\", description = \"Send\"}\n\
         [[mcp_servers]]\nname = \"tools\"\ntransport = \"stdio\"\ncommand = \"/run/espalier/guest\"\nargs = [\"mcp\"]\n",
    ),
    ("t/mail.json", "[{\"id\": 1, \"subject\": \"x\"}]"),
    ("t/instruction.md", "Do it.\n"),
    ("t/verify/check.sh", "echo 1\n"),
];

#[test]
fn services_and_tool_servers_survive_being_written() {
    let folder = tree(MAIL);
    let task = only(&folder.path().join("t"));
    assert_eq!(task.environment.tools[0].name, "send_mail");
    assert_eq!(task.environment.mcp_servers[0].name, "tools");
    assert_eq!(task.environment.services[0].health_check, "/mail/messages");
    let again = folder.path().join("again");
    task::write_dir(&task, &again).unwrap();
    assert_eq!(only(&again), task);
}

#[test]
fn what_is_wrong_with_a_service_is_said() {
    let say = |old: &str, new: &str| {
        let files: Vec<(&str, String)> = MAIL
            .iter()
            .map(|(path, text)| (*path, text.replace(old, new)))
            .collect();
        let files: Vec<(&str, &str)> = files
            .iter()
            .map(|(path, text)| (*path, text.as_str()))
            .collect();
        let folder = tree(&files);
        load_dir(&folder.path().join("t")).unwrap_err().to_string()
    };
    for (old, new, expected) in [
        ("log = \"sent\"\n", "", "expected the list to log in"),
        ("records = \"messages\"\n", "", "names it"),
        ("port = 9100", "port = 0", "a port of its own"),
        (
            "\"mail.json\"",
            "\"../mail.json\"",
            "a path inside the folder",
        ),
        (
            "act = \"list\"",
            "act = \"get\"",
            "the key that names a record",
        ),
        ("act = \"list\"", "act = \"fly\"", "unknown variant"),
        (
            "command = \"/run/espalier/guest\"\n",
            "",
            "mcp_servers.tools.command",
        ),
    ] {
        let found = say(old, new);
        assert!(found.contains(expected), "{old:?} gave: {found}");
    }
}

#[test]
fn servers_beside_a_table_of_mcp_atlas_are_those_that_its_tools_need() {
    let files: &[(&str, &str)] = &[
        (
            "t/atlas.csv",
            "TASK,PROMPT,ENABLED_TOOLS,GTFA_CLAIMS\none,Look.,\"[\"\"files_read\"\", \"\"files_extra__list\"\"]\",\"[\"\"it looked\"\"]\"\ntwo,Look.,\"[\"\"moon_walk\"\"]\",\"[\"\"it looked\"\"]\"\n",
        ),
        (
            "t/mcp-servers.json",
            "{\"mcpServers\": {\"files\": {\"command\": \"serve\"}, \"files_extra\": {\"type\": \"http\", \"url\": \"http://127.0.0.1:1/mcp\"}, \"other\": {\"command\": \"x\"}}}",
        ),
    ];
    let folder = tree(files);
    let tasks = task::load_dir(&folder.path().join("t/atlas.csv")).unwrap();
    let names: Vec<&str> = tasks[0]
        .environment
        .mcp_servers
        .iter()
        .map(|server| server.name.as_str())
        .collect();
    assert_eq!(names, ["files", "files_extra"]);
    assert_eq!(tasks[0].environment.refusals, Vec::<String>::new());
    assert_eq!(
        tasks[1].environment.refusals,
        ["no server of mcp-servers.json has its tool moon_walk"]
    );
}
