// The stream of what the engine does; connects again by itself.

import { request } from "./access.js";
import { events } from "./sse.js";

const LONGEST_WAIT_S = 10;

export class Feed {
  #hurry = () => {};

  /**
   * @param {(update: object) => void} onUpdate gets `{points, now}`.
   * @param {(waitS: number) => void} onLost is told how long it waits before the next try.
   */
  constructor(onUpdate, onLost) {
    this.onUpdate = onUpdate;
    this.onLost = onLost;
  }

  async run() {
    let wait = 1;
    for (;;) {
      try {
        const response = await request("dashboard/feed");
        if (!response.ok) throw new Error(`the server answered ${response.status}`);
        for await (const text of events(response)) {
          this.#tell(JSON.parse(text));
          wait = 1;
        }
      } catch (error) {
        console.info("the live feed has ended:", error.message);
      }
      this.onLost(wait);
      await this.#pause(wait);
      wait = Math.min(2 * wait, LONGEST_WAIT_S);
    }
  }

  /** Tries at once. */
  hurry() {
    this.#hurry();
  }

  /** What goes wrong in drawing is no reason to connect again. */
  #tell(update) {
    try {
      this.onUpdate(update);
    } catch (error) {
      reportError(error);
    }
  }

  #pause(seconds) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, 1e3 * seconds);
      this.#hurry = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}
