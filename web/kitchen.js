/**
 * Shows the text of a `KitchenReport` node inside the node after it has run.
 *
 * The node sends `{text: [report], kitchen: [the same report as JSON]}`. A part of the frontend that is missing (an
 * older or newer version) costs the box in the node, never the page: the report is still the node's output and in the
 * log.
 */
import { app } from "../../scripts/app.js";

const OUR_NODE = /^Kitchen(CheckpointLoader|DiffusionModelLoader|Accelerate|Report)$/;
const NODE = "KitchenReport";
const WIDGET = "report";

/** The node's property that keeps the last report, so that it survives saving and reloading the workflow. */
const PROPERTY = "kitchen_report";

/** Size of a new node, in canvas units: a report's lines are long. */
const MIN_SIZE = [460, 300];

const HINTS = {
  en: "The report appears here after a run.",
  zh: "运行后在此显示报告。",
};

/** Runs `action`; a failure is one warning in the console. */
function guarded(action) {
  try {
    return action();
  } catch (error) {
    console.warn("[kitchen_accel] the report cannot be shown in the node:", error);
    return undefined;
  }
}

function locale() {
  return String(app.extensionManager?.setting?.get?.("Comfy.Locale") ?? "en");
}

function hint() {
  return locale().startsWith("zh") ? HINTS.zh : HINTS.en;
}

/**
 * Titles and descriptions of our own nodes in the user's language. Frontends around 1.32 load a language after they
 * have merged the packs' translations, and so lose them; in all others this writes what is there already.
 */
async function translate(defs) {
  const language = locale();
  if (language.startsWith("en") || typeof app.api?.fetchApi !== "function") return;
  const answer = await app.api.fetchApi("/i18n");
  const texts = (await answer.json())?.[language]?.nodeDefs ?? {};
  for (const [name, def] of Object.entries(defs ?? {})) {
    const text = OUR_NODE.test(name) ? texts[name] : undefined;
    if (text?.display_name) def.display_name = text.display_name;
    if (text?.description) def.description = text.description;
  }
}

/** The read-only text box of `node`, made on the first call; undefined where the frontend has no such box. */
function boxOf(node) {
  const existing = node.widgets?.find((widget) => widget.name === WIDGET);
  if (existing) return existing;
  const make = app.widgets?.STRING ?? window.comfyAPI?.widgets?.ComfyWidgets?.STRING;
  const box = make?.(node, WIDGET, ["STRING", { multiline: true, default: "", placeholder: hint() }], app)?.widget;
  if (!box) return undefined;
  // out of the saved widget values and out of the prompt: it is an output
  box.serialize = false;
  box.options ??= {};
  box.options.serialize = false;
  box.options.read_only = true;
  const element = box.element ?? box.inputEl;
  if (element) {
    element.readOnly = true;
    element.spellcheck = false;
    element.style.fontFamily = "ui-monospace, Menlo, Consolas, monospace";
  }
  return box;
}

/** The report in a node's output; undefined where there is none. */
function textOf(output) {
  const text = output?.text;
  if (text === undefined || text === null) return undefined;
  return Array.isArray(text) ? text.join("\n\n") : String(text);
}

/** `text` with the report's folders cut to their last name: saved workflows and pictures are shared with others. */
function withoutFolders(text, output) {
  const paths = new Set();
  for (const json of output?.kitchen ?? []) {
    const report = guarded(() => JSON.parse(json)) ?? {};
    for (const path of [report.config, report.cache, report.journal]) {
      if (typeof path === "string" && path) paths.add(path);
    }
  }
  // the longest first: one of them may lie in another
  const ordered = [...paths].sort((a, b) => b.length - a.length);
  return ordered.reduce((kept, path) => kept.replaceAll(path, path.split(/[\\/]/).pop()), text);
}

function show(node, text) {
  const box = boxOf(node);
  if (!box || box.value === text) return;
  box.value = text;
  node.setDirtyCanvas?.(true, true);
}

function showOutput(node, output) {
  const text = textOf(output);
  if (text === undefined) return;
  show(node, text);
  node.properties ??= {};
  node.properties[PROPERTY] = withoutFolders(text, output);
}

/** Has `prototype[name]` call `action(node, argument)` after what it did before. */
function chain(prototype, name, action) {
  const before = prototype[name];
  prototype[name] = function (...args) {
    const result = before?.apply(this, args);
    guarded(() => action(this, args[0]));
    return result;
  };
}

/**
 * ComfyUI serves this folder under the pack's folder name and, from pyproject.toml, under the project's name, because
 * its server cannot serve files of a folder whose name has spaces or non-ASCII letters. So this file may load twice.
 */
const LOADED = Symbol.for("kitchen_accel.report");

if (!globalThis[LOADED]) {
  globalThis[LOADED] = true;
  app?.registerExtension?.(extension());
}

function extension() {
  return {
    name: "kitchen_accel.report",

    async addCustomNodeDefs(defs) {
      await translate(defs).catch((error) => console.warn("[kitchen_accel] the nodes' titles stay English:", error));
    },

    beforeRegisterNodeDef(nodeType, nodeData) {
      if (nodeData?.name !== NODE) return;
      chain(nodeType.prototype, "onNodeCreated", (node) => {
        if (!boxOf(node)) return;
        const [width = 0, height = 0] = node.size ?? [];
        node.setSize?.([Math.max(width, MIN_SIZE[0]), Math.max(height, MIN_SIZE[1])]);
      });
      chain(nodeType.prototype, "onConfigure", (node) => {
        const kept = node.properties?.[PROPERTY];
        if (typeof kept === "string") show(node, kept);
      });
      chain(nodeType.prototype, "onExecuted", showOutput);
    },

    // a finished job opened from the queue, and another workflow's tab: outputs come back without a run
    onNodeOutputsUpdated(outputs) {
      guarded(() => {
        const graph = app.rootGraph ?? app.graph;
        for (const [id, output] of Object.entries(outputs ?? {})) {
          const node = graph?.getNodeById?.(Number.isNaN(Number(id)) ? id : Number(id));
          if (node?.type === NODE) showOutput(node, output);
        }
      });
    },
  };
}
