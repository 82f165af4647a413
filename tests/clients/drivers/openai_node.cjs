// The openai package of Node: a chat whole and streamed, tools by runTools, a structured answer, and an error.
// The first argument is the server of the embedded model, the second one whose model says what a test wants.

const OpenAI = require("openai");

const QUESTIONS = ["What do dormice build?", "Of what?", "Where?", "Say it in three words."];

async function chat(client, model, stream) {
  const messages = [];
  const turns = [];
  for (const content of QUESTIONS) {
    messages.push({ role: "user", content });
    const asked = { model, messages, max_tokens: 20, temperature: 0, session_id: `node-${stream}` };
    let text = "", session, usage, reason;
    if (stream) {
      const options = { stream: true, stream_options: { include_usage: true } };
      for await (const chunk of await client.chat.completions.create({ ...asked, ...options })) {
        const choice = chunk.choices[0];
        text += choice?.delta?.content ?? "";
        reason = choice?.finish_reason ?? reason;
        session = chunk.session ?? session;
        usage = chunk.usage ?? usage;
      }
    } else {
      const reply = await client.chat.completions.create(asked);
      text = reply.choices[0].message.content;
      reason = reply.choices[0].finish_reason;
      ({ session, usage } = reply);
    }
    messages.push({ role: "assistant", content: text });
    turns.push({ text, reason, session, usage });
  }
  return turns;
}

async function tools(client, model, stream) {
  const ran = [];
  const schema = { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } } };
  const runner = client.chat.completions.runTools({
    model,
    stream,
    messages: [{ role: "user", content: "Will I need an umbrella in Paris?" }],
    tools: [{
      type: "function",
      function: {
        name: "get_weather",
        description: "Tell the weather of a city.",
        parameters: schema,
        parse: JSON.parse,
        function: (args) => { ran.push(args); return `Rain in ${args.city} for ${args.days} days.`; },
      },
    }],
  });
  return { said: await runner.finalContent(), ran, usage: (await runner.totalUsage()) };
}

async function held(client, model) {
  const schema = { type: "object", properties: { nut: { enum: ["hazel", "beech"] } }, required: ["nut"], additionalProperties: false };
  const reply = await client.chat.completions.parse({
    model,
    messages: [{ role: "user", content: "Which nut?" }],
    response_format: { type: "json_schema", json_schema: { name: "nut", strict: true, schema } },
  });
  return JSON.parse(reply.choices[0].message.content);
}

async function refused(client) {
  try {
    await client.chat.completions.create({ model: "no-such-model", messages: [{ role: "user", content: "Hello" }] });
  } catch (error) {
    return { name: error.constructor.name, status: error.status, code: error.code, param: error.param };
  }
  return {};
}

async function main([url, forcedUrl, model]) {
  const client = new OpenAI({ baseURL: url, apiKey: "unused" });
  const forced = new OpenAI({ baseURL: forcedUrl, apiKey: "unused" });
  console.log(JSON.stringify({
    models: (await client.models.list()).data.map((each) => each.id),
    whole: await chat(client, model, false),
    streamed: await chat(client, model, true),
    tools: await tools(forced, model, false),
    toolsStreamed: await tools(forced, model, true),
    held: await held(client, model),
    refused: await refused(client),
  }));
}

main(process.argv.slice(2));
