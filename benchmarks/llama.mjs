// Times llama.cpp, through node-llama-cpp, on a GGUF file; prints a JSON line like examples/decoding.rs.
//
//     node benchmarks/llama.mjs MODEL.gguf [--prompt N,..] [--new N] [--threads N] [--modules FOLDER]
//
// FOLDER holds node_modules with node-llama-cpp.

import {createRequire} from "node:module";
import path from "node:path";
import {pathToFileURL} from "node:url";

const words = process.argv.slice(2);
const option = (name, otherwise) => (words.includes(name) ? words[words.indexOf(name) + 1] : otherwise);
const require = createRequire(path.join(path.resolve(option("--modules", ".")), "here.js"));
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(require.resolve("node-llama-cpp")));

const threads = Number(option("--threads", "2"));
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: threads});
const model = await llama.loadModel({modelPath: words[0]});
const context = await model.createContext({contextSize: 1024, batchSize: 1024, threads});
const sequence = context.getSequence();
const ids = (count) => Array.from({length: count}, (_, at) => (at * 7919 + 13) % 50000);
const results = {};

for (const count of option("--prompt", "512").split(",").map(Number)) {
    const seconds = [];
    for (let round = 0; round < 6; round++) {
        await sequence.clearHistory();
        const start = performance.now();
        await sequence.evaluateWithoutGeneratingNewTokens(ids(count));
        seconds.push((performance.now() - start) / 1000);
    }
    seconds.shift();
    seconds.sort((a, b) => a - b);
    results[`prompt ${count}`] = Math.round((10 * count) / seconds[2]) / 10;
}

const wanted = Number(option("--new", "128"));
await sequence.clearHistory();
await sequence.evaluateWithoutGeneratingNewTokens(ids(32));
let made = 0;
let start = null;
// The first token also pays for its prompt's last one; time runs from there.
for await (const _ of sequence.evaluate([42], {temperature: 0, yieldEogToken: true})) {
    if (start === null)
        start = performance.now();
    else if (++made === wanted)
        break;
}
results["rows 1"] = Math.round((10000 * made) / (performance.now() - start)) / 10;
console.log(JSON.stringify(results));
process.exit(0);
