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
