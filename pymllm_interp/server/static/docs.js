"use strict";

// Draws /openapi.json. All of it becomes text nodes: nothing of the document is read as HTML.

function element(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function typeOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  const choices = schema.anyOf || schema.oneOf;
  if (choices) return choices.map(typeOf).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.type === "array") return `[${typeOf(schema.items) || "any"}]`;
  return schema.type || "any";
}

function fields(schema) {
  const table = element("table");
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const needed = (schema.required || []).includes(name) ? "required" : "";
    table.append(element("tr", "", element("th", name), element("td", typeOf(field)), element("td", needed),
      element("td", field.description || "")));
  }
  return table;
}

function route(path, method, operation) {
  const made = element("article", "", element("h2", `${method.toUpperCase()} ${path}`), element("p", operation.description || ""));
  const content = (operation.requestBody || {}).content || {};
  for (const [kind, body] of Object.entries(content)) made.append(element("p", `${kind}: ${typeOf(body.schema)}`));
  return made;
}

async function draw() {
  const found = await (await fetch("openapi.json")).json();
  document.getElementById("about").textContent = `${found.info.title} ${found.info.version}. ${found.info.description || ""}`;
  for (const [path, methods] of Object.entries(found.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      document.getElementById("routes").append(route(path, method, operation));
    }
  }
  for (const [name, schema] of Object.entries(found.components.schemas)) {
    const box = element("details", "", element("summary", name), element("p", schema.description || ""), fields(schema));
    document.getElementById("schemas").append(box);
  }
}

draw().catch((error) => { document.getElementById("about").textContent = `/openapi.json: ${error}`; });
