// Where the data comes from: the server that sent this page, or the page itself when it is a file.

class Server {
  isLive = true;

  runs = () => ask("api/runs");
  summary = (run) => ask(`api/runs/${name(run)}/summary`);
  window = (run, from, to, width, lanes, expanded) =>
    ask(`api/runs/${name(run)}/schedule?from=${Math.floor(from)}&to=${Math.ceil(to)}&width=${width}&lanes=${lanes.join(",")}&expanded=${expanded.join(",")}`);
  span = (run, index) => ask(`api/runs/${name(run)}/span/${index}`);
  samples = (run) => ask(`api/runs/${name(run)}/samples`);
  sample = (run, call, prompt, member) => ask(`api/runs/${name(run)}/samples/${call}/${prompt}/${member}`);
  group = (run, call, prompt) => ask(`api/runs/${name(run)}/groups/${call}/${prompt}`);
  texts = (run, ids) => ask(`api/runs/${name(run)}/texts?of=${ids.map((id) => id.join("-")).join(",")}`);
  search = (run, words) => ask(`api/runs/${name(run)}/search?q=${name(words)}`);
  exported = (run, kind, where) => `api/runs/${name(run)}/export?as=${kind}&${where}`;
  alerts = (run) => ask(`api/runs/${name(run)}/alerts`);
  suggestions = (run, isAsked) => ask(`api/runs/${name(run)}/suggestions${isAsked ? "?ask=1" : ""}`);
  graph = (run) => ask(`api/runs/${name(run)}/graph`);
  training = (run) => ask(`api/runs/${name(run)}/training`);
  against = (run, other) => ask(`api/runs/${name(run)}/against/${name(other)}`);
  health = (run) => ask(`api/runs/${name(run)}/health`);
  analysis = (run) => ask(`api/runs/${name(run)}/analysis`);
  log = async (run, worker) => (await ask(`api/runs/${name(run)}/log/${name(worker)}`)).text;
}

const name = encodeURIComponent;

async function ask(path) {
  let answer;
  try {
    answer = await fetch(path, { headers: { Accept: "application/json" } });
  } catch {
    throw new Error("The viewer's server does not answer. Is `m2flow view` still running?");
  }
  const said = await answer.json().catch(() => ({ error: `the server said ${answer.status}` }));
  if (!answer.ok) throw new Error(said.error ?? `the server said ${answer.status}`);
  return said;
}

class File {
  isLive = false;

  constructor(data) {
    this.data = data;
  }

  runs = async () => [{ name: this.data.summary.name, flow: this.data.summary.flow, state: this.data.summary.state, num_bytes: 0 }];
  summary = async () => this.data.summary;
  window = async () => this.data.schedule.lanes;
  span = async () => null;
  samples = async () => this.data.samples;
  sample = async (_, call, prompt, member) => {
    const found = this.data.texts[`${call}/${prompt}/${member}`];
    if (!found) throw new Error("This file was written without the text of this sample. `m2flow view` on the run's directory shows all of them.");
    return found;
  };
  group = async (_, call, prompt) => {
    const members = Object.values(this.data.texts).filter((one) => one.call === call && one.prompt === prompt);
    if (!members.length) throw new Error("This file was written without the texts of this group. `m2flow view` on the run's directory shows all of them.");
    const [first] = members;
    return { ...first, prompt_text: first.prompt_text, evaluates: false, members: members.map((one) => ({ member: one.member, response: one.response_text, reward: Object.values(one.rewards).at(-1) ?? null, advantage: null, parts: Object.assign({}, ...Object.values(one.parts)), tokens: one.response_tokens, finish: one.finish, ending: one.ending, mean_logprob: null, versions: [] })) };
  };
  texts = async (_, ids) => Object.fromEntries(ids.map((id) => [id.join("/"), this.data.texts[id.join("/")]]).filter(([, page]) => page).map(([id, page]) => [id, [page.prompt_text.slice(-400), page.response_text.slice(0, 400)]]));
  search = async (_, words) => Object.values(this.data.texts).filter((one) => [one.prompt_text, one.response_text, JSON.stringify(one.columns)].some((text) => text.toLowerCase().includes(words.toLowerCase()))).map((one) => [one.call, one.prompt, one.member]);
  exported = () => "";
  alerts = async () => this.data.alerts ?? [];
  suggestions = async () => this.data.suggestions ?? null;
  graph = async () => this.data.graph;
  training = async () => this.data.training;
  health = async () => this.data.health;
  analysis = async () => this.data.analysis;
  log = async (_, worker) => this.data.logs[worker] ?? "";
  get note() {
    return this.data.schedule.width ? "This file shows the schedule merged to what fits it; `m2flow view` on the run's directory shows every span." : "";
  }
}

export async function findSource() {
  const data = document.getElementById("data");
  if (!data) return new Server();
  const packed = Uint8Array.from(atob(data.textContent.trim()), (letter) => letter.charCodeAt(0));
  const text = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  return new File(JSON.parse(text));
}
